package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// describeVersion names the version, the commit and the Go release.
func describeVersion() string {
	commit := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				commit = " (" + s.Value[:12] + ")"
			}
		}
	}
	return fmt.Sprintf("windlass engine %s%s %s %s/%s", version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
