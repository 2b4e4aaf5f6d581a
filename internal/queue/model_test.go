package queue

import (
	"cmp"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// model is what doc.go says, for one key, with nothing clever in it.
type model struct {
	waiting, manual, running, parked bool
	causes                           int // of the request that waits
	attempt                          int
	due, notBefore, later            int64
	retry                            bool
	deletion                         bool
	quiet, quietMax                  int64 // of the request that waits
	pause, all                       *Pause

	// of the run under way
	superseded int64
	early      bool
	laterTaken bool
}

func (m *model) ready(now int64) bool {
	if m.running {
		return false
	}
	if p := cmp.Or(m.pause, m.all); p != nil && (p.Until == 0 || p.Until > now) && (!m.waiting || !m.deletion || p.Deletions) {
		return false
	}
	return m.waiting && (m.manual || max(m.notBefore, m.quiet) <= now) ||
		m.due != 0 && max(m.due, m.notBefore) <= now ||
		m.later != 0 && max(m.later, m.notBefore) <= now
}

func (m *model) unpark() {
	*m = model{
		waiting: m.waiting, running: m.running, causes: m.causes, later: m.later, deletion: m.deletion, pause: m.pause, all: m.all,
		quiet: m.quiet, quietMax: m.quietMax,
	}
}

func (m *model) add(now int64, o Options, after, most time.Duration) {
	if m.parked {
		m.unpark()
	}
	// Once ready, it stays ready; and what waits with no window has a reason of its own.
	if after > 0 && !o.Manual && !m.ready(now) && (!m.waiting || m.quiet != 0) {
		if !m.waiting {
			m.quietMax = now + int64(most)
		}
		m.quiet = min(now+int64(after), m.quietMax)
	}
	m.waiting, m.manual, m.deletion = true, m.manual || o.Manual, m.deletion || o.Deletion
	m.causes++
}

func (m *model) addLater(at int64) {
	if m.later == 0 || m.laterTaken || at < m.later {
		m.later, m.laterTaken = at, false
	}
}

func (m *model) take(now int64) (attempt int, retryPending bool) {
	if m.parked {
		m.unpark()
	}
	m.superseded, m.early = 0, false
	if m.due > now {
		m.superseded, m.early = m.due, m.retry
	}
	m.laterTaken = m.later != 0 && m.later <= now
	m.waiting, m.manual, m.running, m.causes = false, false, true, 0
	m.deletion, m.quiet, m.quietMax = false, 0, 0
	return m.attempt, m.due > now && m.retry
}

func (m *model) finish(now int64, v Verdict, after, notBefore time.Duration) {
	if v == Interrupt {
		m.running, m.waiting, m.laterTaken = false, true, false
		return
	}
	if m.laterTaken {
		m.later, m.laterTaken = 0, false
	}
	due := now + int64(after)
	old := *m
	m.due, m.notBefore, m.retry, m.running = 0, 0, false, false
	switch v {
	case Done:
		m.attempt = 0
	case Requeue:
		m.attempt, m.due = 0, due
	case Defer:
		m.due = due
	case Park:
		m.attempt, m.parked = old.attempt+1, true
	case Retry:
		m.retry, m.due = true, due
		switch {
		case old.early && old.superseded > now:
			m.due = old.superseded
		case old.early:
		default:
			m.attempt++
			if old.superseded > now {
				m.due = min(due, old.superseded)
			}
		}
		if notBefore > 0 {
			m.notBefore = now + int64(notBefore)
		}
	}
	if m.parked && m.waiting {
		manual := m.manual
		m.unpark()
		m.manual = manual
	}
}

// inBubble hides the test's deadline, which must not be asked for in virtual time.
type inBubble struct{ rapid.TB }

// TestModel drives the queue and the model with the same random actions and compares them after each.
func TestModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(inBubble{t}, func(t *rapid.T) {
			cfg := Config[string, int]{Join: func(into *int, from int) { *into += from }}
			if rapid.Bool().Draw(t, "debounced") {
				cfg.Debounce, cfg.DebounceMax = 2*time.Second, 3*time.Second
			}
			q := New[string](cfg)
			defer func() { q.Close() }()
			keys := []string{"a", "b", "c"}
			models := map[string]*model{"a": {}, "b": {}, "c": {}}
			running := map[string]Run[string, int]{}
			pick := rapid.SampledFrom(keys)
			delay := rapid.SampledFrom([]time.Duration{0, time.Second, 2 * time.Second, 5 * time.Second})
			t.Repeat(map[string]func(*rapid.T){
				"add": func(t *rapid.T) {
					k := pick.Draw(t, "key")
					o := Options{
						Class:  Class(rapid.IntRange(0, 2).Draw(t, "class")),
						Manual: rapid.IntRange(0, 9).Draw(t, "manual") == 0, Deletion: rapid.IntRange(0, 3).Draw(t, "deletion") == 0,
					}
					if rapid.Bool().Draw(t, "put") {
						q.Put(k, 1, o)
					} else {
						q.Add(k, 1, o)
					}
					models[k].add(time.Now().UnixNano(), o, cfg.Debounce, cfg.DebounceMax)
				},
				"pause": func(t *rapid.T) {
					var p *Pause
					if rapid.IntRange(0, 2).Draw(t, "resume") > 0 {
						p = &Pause{Deletions: rapid.Bool().Draw(t, "deletions")}
						if rapid.Bool().Draw(t, "ends") {
							p.Until = time.Now().Add(time.Second + delay.Draw(t, "until")).UnixNano()
						}
					}
					if rapid.IntRange(0, 3).Draw(t, "all") > 0 {
						k := pick.Draw(t, "key")
						q.Pause(&k, p)
						models[k].pause = p
						return
					}
					for _, m := range models {
						m.all = p
					}
					q.Pause(nil, p)
				},
				"later": func(t *rapid.T) {
					k, at := pick.Draw(t, "key"), time.Now().Add(time.Second+delay.Draw(t, "delay")).UnixNano()
					q.Add(k, 1, Options{Later: at})
					models[k].addLater(at)
				},
				"advance": func(t *rapid.T) {
					time.Sleep(delay.Draw(t, "delay"))
					synctest.Wait()
				},
				"take": func(t *rapid.T) {
					if s := q.Stats(); s.Ready == [3]int{} {
						t.Skip()
					}
					run, ok := q.Next()
					require.True(t, ok)
					m, now := models[run.Key], time.Now().UnixNano()
					require.True(t, m.ready(now), "%s was taken and is not ready", run.Key)
					require.GreaterOrEqual(t, run.Value, m.causes, "causes are joined, none is lost")
					attempt, pending := m.take(now)
					require.Equal(t, attempt, run.Attempt, "attempt")
					require.Equal(t, pending, run.RetryPending, "retry pending")
					running[run.Key] = run
				},
				"finish": func(t *rapid.T) {
					k := pick.Draw(t, "key")
					run, ok := running[k]
					if !ok {
						t.Skip()
					}
					delete(running, k)
					o := Outcome[int]{
						Verdict: Verdict(rapid.IntRange(0, int(Interrupt)).Draw(t, "verdict")), After: delay.Draw(t, "after"), Value: run.Value,
					}
					if o.Verdict == Retry {
						o.NotBefore = delay.Draw(t, "not before")
					}
					models[k].finish(time.Now().UnixNano(), o.Verdict, o.After, o.NotBefore)
					if q.Stats().Ready != [3]int{} && rapid.Bool().Draw(t, "next") {
						require.True(t, q.FinishNext(&run, &o, time.Now().UnixNano()))
						m := models[run.Key]
						require.True(t, m.ready(time.Now().UnixNano()), "%s was taken and is not ready", run.Key)
						m.take(time.Now().UnixNano())
						running[run.Key] = run
						return
					}
					q.Finish(run, o)
					q.Release(k)
				},
				"restart": func(t *rapid.T) {
					if len(running) > 0 {
						t.Skip()
					}
					next := New[string](q.cfg)
					for _, k := range keys {
						next.Pause(nil, models[k].all)
						next.Pause(&k, models[k].pause)
						if s, ok := q.Hold(k); ok {
							next.Restore(s)
						}
						m := models[k]
						// What only waited is listed again by its source, and the engine keeps pauses.
						m.waiting, m.manual, m.deletion, m.causes, m.quiet, m.quietMax = false, false, false, 0, 0, 0
					}
					q.Close()
					q = next
					synctest.Wait()
				},
				"": func(t *rapid.T) {
					now := time.Now().UnixNano()
					items := map[string]Item[string, int]{}
					ready := 0
					for _, it := range q.Items() {
						items[it.Key] = it
					}
					for _, k := range keys {
						m, it := models[k], items[k]
						if m.ready(now) {
							ready++
							require.Equal(t, Ready, it.Phase, "%s is ready: %+v", k, *m)
						}
						require.Equal(t, m.running, it.Phase == Running, "%s runs", k)
						if !m.running && !m.ready(now) {
							require.Equal(t, m.attempt, it.Attempt, "attempt of %s: %+v", k, *m)
						}
						require.Equal(t, m.parked && !m.running && !m.ready(now) && !m.waiting, it.Parked && it.Phase == Parked, "%s is parked: %+v", k, *m)
					}
					s := q.Stats()
					require.Equal(t, ready, s.Ready[0]+s.Ready[1]+s.Ready[2], "ready keys: %s", fmt.Sprint(q.Items()))
					require.Equal(t, len(running), s.Running)
				},
			})
		})
	})
}
