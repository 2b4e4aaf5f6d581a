package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/windlass-dev/windlass/internal/link"
)

// conductor starts everything, disturbs it, and checks.
type conductor struct {
	bus      string
	former   string
	length   time.Duration
	seed     uint64
	keys     int
	rate     int
	replicas int
	log      *slog.Logger

	rng    *rand.Rand
	dir    string
	plain  *natsBroker // where the orders, the results and the journal are
	broker broker      // where the bus is
	fleet  []*replica
	nc     *natsgo.Conn
	js     jetstream.JetStream

	published []atomic.Int64 // by key
	kills     int
	takeovers []time.Duration
	handovers []time.Duration
	waiting   sync.WaitGroup // for what is measured
	mu        sync.Mutex
	check     *checker
}

// replica is an engine's process with its links to the broker, one for each of its servers.
type replica struct {
	links []*link.Link
	cmd   *exec.Cmd
}

func (r *replica) sever() {
	for _, l := range r.links {
		l.Sever(true)
	}
}

func (r *replica) mend() {
	for _, l := range r.links {
		l.Sever(false)
	}
}

func (c *conductor) run(ctx context.Context) (err error) {
	c.rng = rand.New(rand.NewPCG(c.seed, 0)) //nolint:gosec // faults are no secret.
	if c.dir, err = os.MkdirTemp("", "windlass-soak-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(c.dir) }()
	defer c.killAll()
	if err := c.begin(ctx); err != nil {
		return err
	}
	c.log.Info("soaking", "for", c.length, "seed", c.seed, "keys", c.keys, "rate", c.rate, "replicas", c.replicas)
	load, stop := context.WithCancel(ctx)
	var loading sync.WaitGroup
	loading.Go(func() { c.load(load) })
	c.disturb(ctx)
	stop()
	loading.Wait()
	c.waiting.Wait()
	return c.conclude(ctx)
}

func (c *conductor) begin(ctx context.Context) (err error) {
	replicas := 1
	if c.bus == "nats3" {
		replicas = 3
	}
	if c.plain, err = newNATSBroker(ctx, c.dir, replicas); err != nil {
		return err
	}
	if c.broker = c.plain; c.bus == "redis" {
		if c.broker, err = newRedisBroker(ctx, c.dir); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		if c.nc, err = natsgo.Connect(natsURL(c.plain.addresses()), natsgo.MaxReconnects(-1), natsgo.ReconnectWait(100*time.Millisecond), natsgo.ReconnectBufSize(-1)); err == nil {
			break
		}
		nap(ctx, 50*time.Millisecond)
	}
	if c.js, err = jetstream.New(c.nc); err != nil {
		return err
	}
	c.plain.js = c.js
	if err := c.plain.await(ctx); err != nil {
		return err
	}
	if _, err = c.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "orders", Replicas: replicas}); err != nil {
		return err
	}
	if _, err = c.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "results", History: 64, Replicas: replicas}); err != nil {
		return err
	}
	if _, err = c.js.CreateStream(ctx, jetstream.StreamConfig{Name: journal, Subjects: []string{"journal.>"}, Replicas: replicas}); err != nil {
		return err
	}
	c.published = make([]atomic.Int64, c.keys)
	c.check = newChecker()
	for range c.replicas {
		r := &replica{}
		for _, address := range c.broker.addresses() {
			p, err := link.New(ctx, address)
			if err != nil {
				return err
			}
			r.links = append(r.links, p)
		}
		c.fleet = append(c.fleet, r)
		if err := c.startEngine(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// natsURL is what clients are given to connect to servers.
func natsURL(addresses []string) string { return "nats://" + strings.Join(addresses, ",nats://") }

func (c *conductor) startEngine(ctx context.Context, r *replica) (err error) {
	var through []string
	for _, l := range r.links {
		through = append(through, l.Address())
	}
	url, redis := natsURL(through), ""
	if c.bus == "redis" {
		url, redis = natsURL(c.plain.addresses()), through[0]
	}
	program := os.Args[0]
	if c.former != "" && r == c.fleet[0] {
		program = c.former
	}
	r.cmd, err = process(ctx, program, "-role", "engine", "-bus", c.bus, "-url", url, "-redis", redis)
	return err
}

func (c *conductor) killAll() {
	for _, r := range c.fleet {
		if r.cmd != nil && r.cmd.Process != nil {
			_ = r.cmd.Process.Kill()
			_ = r.cmd.Wait()
		}
		for _, l := range r.links {
			l.Close()
		}
	}
	if c.plain != nil {
		c.plain.kill()
	}
	if c.broker != nil && c.broker != broker(c.plain) {
		c.broker.kill()
	}
}

// load changes keys at a steady rate. A change counts once the server has it.
func (c *conductor) load(ctx context.Context) {
	ticker := time.NewTicker(time.Second / time.Duration(c.rate))
	defer ticker.Stop()
	rng := rand.New(rand.NewPCG(c.seed, 1)) //nolint:gosec // no secret.
	for ctx.Err() == nil {
		<-ticker.C
		k := rng.IntN(c.keys)
		version := c.published[k].Load() + 1
		m := natsgo.NewMsg("$KV.orders.k" + strconv.Itoa(k))
		m.Data = []byte(strconv.FormatInt(version, 10))
		for ctx.Err() == nil {
			put, cancel := context.WithTimeout(ctx, time.Second)
			_, err := c.js.PublishMsg(put, m)
			cancel()
			if err == nil {
				c.published[k].Store(version)
				break
			}
			nap(ctx, 50*time.Millisecond)
		}
	}
}

func nap(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// logFile is where the processes write. It is left where a promise was broken.
const logFile = "soak.log"

// disturb does one bad thing after the other until the time is over.
func (c *conductor) disturb(ctx context.Context) {
	over := time.Now().Add(c.length)
	nap(ctx, 3*time.Second)
	for time.Now().Before(over) && ctx.Err() == nil {
		r := c.fleet[c.rng.IntN(len(c.fleet))]
		what := c.rng.IntN(6)
		c.log.Info([]string{"kill", "stop and continue", "terminate", "cut the link", "restart the server", "stop the server"}[what])
		outage := c.broker.ttl() + 2*time.Second
		switch what {
		case 0:
			c.measure(ctx, r, &c.takeovers)
			end(r.cmd, syscall.SIGKILL)
			c.kills++
			c.waiting.Wait()
			must(c.startEngine(ctx, r))
		case 1:
			_ = r.cmd.Process.Signal(syscall.SIGSTOP)
			nap(ctx, outage)
			_ = r.cmd.Process.Signal(syscall.SIGCONT)
		case 2:
			c.measure(ctx, r, &c.handovers)
			end(r.cmd, syscall.SIGTERM)
			c.waiting.Wait()
			must(c.startEngine(ctx, r))
		case 3:
			r.sever()
			nap(ctx, outage)
			r.mend()
		case 4:
			c.broker.disturb(ctx, c.rng, 0)
		case 5:
			c.broker.disturb(ctx, c.rng, outage)
		}
		nap(ctx, time.Second+time.Duration(c.rng.Int64N(int64(4*time.Second))))
	}
}

// measure finds out how long it takes from now until all that a replica holds is somebody else's.
func (c *conductor) measure(ctx context.Context, r *replica, into *[]time.Duration) {
	of := fmt.Sprintf("-%d-", r.cmd.Process.Pid)
	holders, err := c.broker.claims(ctx)
	if err != nil || !strings.Contains(strings.Join(slices.Collect(maps.Values(holders)), " "), of) {
		return
	}
	start := time.Now()
	c.waiting.Go(func() {
		for time.Since(start) < 40*time.Second && ctx.Err() == nil {
			nap(ctx, 10*time.Millisecond)
			now, err := c.broker.claims(ctx)
			if err != nil {
				return // the next disturbance has begun
			}
			taken := true
			for _, h := range now {
				taken = taken && h != "" && !strings.Contains(h, of)
			}
			if taken {
				c.mu.Lock()
				defer c.mu.Unlock()
				*into = append(*into, time.Since(start))
				return
			}
		}
	})
}

// verdict is the line that soak prints.
type verdict struct {
	Bus         string `json:"bus"`
	Seconds     int    `json:"seconds"`
	Seed        uint64 `json:"seed"`
	Changes     int64  `json:"changes"`
	Runs        int    `json:"runs"`
	Lost        int    `json:"lost"`
	Overlaps    int    `json:"overlaps"`
	Outdated    int    `json:"outdated"`
	StaleWrites int    `json:"stale_writes"`
	Early       int    `json:"early"`
	LateP99     int64  `json:"late_p99_ms"`
	Kills       int    `json:"kills"`
	TakeoverP99 int64  `json:"takeover_p99_ms"`
	HandoverP99 int64  `json:"handover_p99_ms"`
}

// conclude waits until the last version of every key was seen, and looks at everything that was noted.
func (c *conductor) conclude(ctx context.Context) error {
	c.log.Info("undisturbed; waiting for the last version of every key")
	v := verdict{Bus: c.bus, Seconds: int(c.length.Seconds()), Seed: c.seed, Kills: c.kills}
	for deadline := time.Now().Add(time.Minute); ; nap(ctx, time.Second) {
		if err := c.check.read(ctx, c.js); err != nil && time.Now().After(deadline) {
			return err
		}
		v.Lost, v.Changes = 0, 0
		for k := range c.published {
			version := int(c.published[k].Load())
			v.Changes += int64(version)
			if c.check.done["k"+strconv.Itoa(k)] < version {
				v.Lost++
			}
		}
		if v.Lost == 0 || time.Now().After(deadline) || ctx.Err() != nil {
			break
		}
	}
	v.Runs, v.Overlaps, v.StaleWrites, v.Early = c.check.runs, c.check.overlaps, c.check.stale, c.check.early
	v.Outdated = c.check.outdated
	v.LateP99, v.TakeoverP99, v.HandoverP99 = p99(c.check.late), p99(c.takeovers), p99(c.handovers)
	c.explain(ctx)
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	if v.Lost+v.Overlaps+v.StaleWrites+v.Early > 0 {
		return errors.New("a promise was broken; what the processes said is in " + logFile)
	}
	return os.Remove(logFile)
}

// explain tells where the keys stand that were lost.
func (c *conductor) explain(ctx context.Context) {
	for k := range c.published {
		key, version := "k"+strconv.Itoa(k), int(c.published[k].Load())
		if c.check.done[key] >= version {
			continue
		}
		c.log.Error("lost", "key", key, "version", version, "seen", c.check.done[key], "fence", c.check.fences[key])
		for _, stream := range []string{"RQ_" + engineName + "_" + controller, "RQS_" + engineName, "KV_windlass_" + engineName, "KV_results", "KV_orders"} {
			s, err := c.js.Stream(ctx, stream)
			if err != nil {
				continue
			}
			info, err := s.Info(ctx, jetstream.WithSubjectFilter(">"))
			if err != nil {
				continue
			}
			for subject := range info.State.Subjects {
				if !strings.HasSuffix(subject, "."+key) && !strings.HasSuffix(subject, "=2F"+key) {
					continue
				}
				m, err := s.GetLastMsgForSubject(ctx, subject)
				if err == nil {
					c.log.Error("there is", "stream", stream, "subject", subject, "sequence", m.Sequence, "time", m.Time, "header", m.Header, "data", string(m.Data))
				}
			}
		}
	}
}

// p99 is in milliseconds, -1 if nothing was measured.
func p99(of []time.Duration) int64 {
	if len(of) == 0 {
		return -1
	}
	slices.Sort(of)
	return of[len(of)*99/100].Milliseconds()
}
