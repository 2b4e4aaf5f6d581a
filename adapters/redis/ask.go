package redis

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
)

// letter is a question to another replica, or its answer.
type letter struct {
	ID   string `json:"id"`
	From string `json:"from,omitempty"` // of a question: where the answer goes
	Text []byte `json:"text"`
}

func (b *Bus) askChannel(member string) string { return b.key("ask:" + member) }

func (b *Bus) post(ctx context.Context, channel string, l letter) error {
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	heard, err := b.conn.client.Publish(ctx, channel, data).Result()
	if err == nil && heard == 0 && b.conn.single { // a node of a Cluster counts only its own listeners
		return errors.New("it does not listen any more")
	}
	return understood(err)
}

// Ask passes a question to another replica and waits for its answer.
func (b *Bus) Ask(ctx context.Context, member string, question []byte) ([]byte, error) {
	id, answered := watermill.NewShortUUID(), make(chan []byte, 1)
	b.mu.Lock()
	b.asked[id] = answered
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.asked, id)
	}()
	if err := b.post(ctx, b.askChannel(member), letter{ID: id, From: b.askChannel(b.id), Text: question}); err != nil {
		return nil, err
	}
	select {
	case text := <-answered:
		return text, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Answer answers what other replicas ask, until ctx ends.
func (b *Bus) Answer(ctx context.Context, answer func(ctx context.Context, question []byte) []byte) error {
	var mu sync.Mutex
	var answers sync.WaitGroup
	stop := b.news.listen(func(channel, text string) {
		if channel != b.askChannel(b.id) {
			return
		}
		var l letter
		if json.Unmarshal([]byte(text), &l) != nil {
			return // nobody can be told
		}
		if l.From == "" {
			b.answered(l)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() == nil {
			// Who asked gives up by itself.
			answers.Go(func() { _ = b.post(ctx, l.From, letter{ID: l.ID, Text: answer(ctx, l.Text)}) })
		}
	})
	<-ctx.Done()
	stop()
	mu.Lock() // no more are begun
	defer mu.Unlock()
	answers.Wait()
	return nil
}

func (b *Bus) answered(l letter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.asked[l.ID]; c != nil {
		c <- l.Text
		delete(b.asked, l.ID)
	}
}
