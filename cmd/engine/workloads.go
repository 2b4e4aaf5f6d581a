package main

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"time"

	"github.com/windlass-dev/windlass/engine"
)

// burst emits all events as fast as they go.
func (r *benchRun) burst(ctx context.Context) (benchResult, error) {
	if err := r.emitAll(ctx); err != nil {
		return benchResult{}, err
	}
	return r.finish(ctx)
}

// drain lets the workers go on once all events were accepted.
func (r *benchRun) drain(ctx context.Context) (benchResult, error) {
	if err := r.emitAll(ctx); err != nil {
		return benchResult{}, err
	}
	r.start = time.Now()
	close(r.gate)
	return r.finish(ctx)
}

func (r *benchRun) emitAll(ctx context.Context) error {
	emitters := 1
	if r.bus != "memory" {
		emitters = 64 // each waits for its acks
	}
	failed := make(chan error, emitters)
	for first := range emitters {
		go func() {
			var err error
			for i := first; i < r.events && err == nil; i += emitters {
				err = r.put(ctx, i)
			}
			failed <- err
		}()
	}
	for range emitters {
		if err := <-failed; err != nil {
			return err
		}
	}
	return nil
}

// paced emits 10,000 events a second.
func (r *benchRun) paced(ctx context.Context) (benchResult, error) {
	const gap = time.Second / 10_000
	for i, begin := 0, time.Now(); i < r.events; i++ {
		for time.Until(begin.Add(time.Duration(i)*gap)) > 0 {
			runtime.Gosched() // a sleep is too coarse
		}
		if err := r.put(ctx, i); err != nil {
			return benchResult{}, err
		}
	}
	return r.finish(ctx)
}

// coldStart lists all keys, and changes some while they wait.
func (r *benchRun) coldStart(ctx context.Context) (benchResult, error) {
	for i, key := range r.keys {
		e := engine.Event{Operation: engine.Resync, Key: key, Revision: "1", Old: benchMeta, New: benchMeta}
		if err := r.source.emit(ctx, e); err != nil {
			return benchResult{}, err
		}
		if i%1000 == 999 {
			if err := r.put(ctx, i-500); err != nil {
				return benchResult{}, err
			}
		}
	}
	return r.finish(ctx)
}

// delayed makes a request for later for every key, all but the last 10,000 of them for much later.
func (r *benchRun) delayed(ctx context.Context) (benchResult, error) {
	near := min(10_000, len(r.keys))
	var empty, full runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&empty)
	begin := time.Now()
	for i, key := range r.keys[:len(r.keys)-near] {
		if err := r.engine.Enqueue(ctx, "bench", key, time.Hour+time.Duration(i*7919%3600)*time.Second); err != nil {
			return benchResult{}, err
		}
	}
	inserted := time.Since(begin)
	for far := len(r.keys) - near; r.engine.Stats()["bench"].Delayed < far; { // a durable bus takes them in a moment later
		if err := nap(ctx); err != nil {
			return benchResult{}, err
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&full)
	for _, key := range r.keys[len(r.keys)-near:] {
		if err := r.engine.Enqueue(ctx, "bench", key, r.source.delayOf(key)); err != nil {
			return benchResult{}, err
		}
	}
	for r.runs.Load() < int64(near) {
		if err := nap(ctx); err != nil {
			return benchResult{}, err
		}
	}
	res := r.result(inserted)
	if far := len(r.keys) - near; far > 0 {
		res.EventsPerSecond = float64(far) / inserted.Seconds()
		res.BytesPerKey = float64(full.HeapAlloc-empty.HeapAlloc)/float64(far) - float64(reflect.TypeFor[engine.Key]().Size())
	}
	return res, nil
}

// pending holds all keys back while they are counted.
func (r *benchRun) pending(ctx context.Context) (benchResult, error) {
	if err := r.engine.Suspend(ctx, "bench", engine.Key{}, engine.Suspension{}); err != nil {
		return benchResult{}, err
	}
	var empty, full runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&empty)
	begin := time.Now()
	for i := range r.events {
		var err error
		if r.workload == "pending" {
			err = r.put(ctx, i)
		} else {
			err = r.source.emitOther(ctx, engine.Event{
				Operation: engine.Put, Key: engine.Key{Kind: benchOther, Namespace: "default", Name: r.keys[i].Name}, Revision: "1", Old: benchMeta, New: benchMeta,
			})
		}
		if err != nil {
			return benchResult{}, err
		}
	}
	took := time.Since(begin)
	if n := r.engine.Stats()["bench"].Stats; n.Ready != [3]int{} {
		return benchResult{}, fmt.Errorf("the suspended controller has ready keys: %+v", n)
	}
	runtime.GC()
	runtime.ReadMemStats(&full)
	res := r.result(took)
	// The names are shared with the bench's own keys, which were there before.
	res.BytesPerKey = float64(full.HeapAlloc-empty.HeapAlloc)/float64(r.events) - float64(reflect.TypeFor[engine.Key]().Size())
	return res, nil
}
