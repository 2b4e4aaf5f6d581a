// Package app turns a config file into a running engine. It knows factories only: which systems there are is decided by
// the maps that its caller passes, so that a program with other components needs another main and nothing else.
//
// Loading has two steps. [Load] reads, decodes and checks everything, connects to nothing, and reports every problem
// at once with file, line and what would have been right. [Plan.Run] connects, builds and runs.
package app
