// Package k8stest helps to test what is written on adapters/k8s.
package k8stest

import (
	"context"
	"testing"

	"github.com/windlass-dev/windlass/adapters/k8s"
)

// RunController runs callbacks until the returned function is called or the test ends, whichever comes first. That function blocks until
// everything has ended, and fails the test if the controller failed.
func RunController(t testing.TB, resource k8s.Callbacks) (c *k8s.CallbackController, stop func()) {
	t.Helper()
	c = &k8s.CallbackController{Resource: resource}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Work(ctx) }()
	stopped := false
	stop = func() {
		t.Helper()
		cancel()
		if stopped {
			return
		}
		stopped = true
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return c, stop
}
