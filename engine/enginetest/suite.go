package enginetest

import (
	"context"
	"testing"
	"time"
)

// testCase is one case of a suite, with its reason.
type testCase[T any] struct {
	name, why string
	run       func(ctx context.Context, t *testing.T, x T)
}

// check runs the cases, each on something new.
func check[T any](t *testing.T, fresh func(t *testing.T) T, cases []testCase[T]) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Log("because", c.why)
			c.run(t.Context(), t, fresh(t))
		})
	}
}

func expect[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

// patience is how long a suite waits for what must happen. It is long: only a broken implementation waits it out.
const patience = 45 * time.Second

// eventually waits until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		//nolint:forbidigo // the suites run on real systems, in real time.
		time.Sleep(2 * time.Millisecond)
	}
}

// quiet waits for a while in which something must not happen.
func quiet(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the suites run on real systems, in real time.
}
