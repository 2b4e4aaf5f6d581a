// Package envelope writes Watermill messages as text, for systems that hold bytes, and where headers cost more than they are worth.
//
//	windlass/1 2f1c3f0e-…
//	windlass-type request/1
//	windlass-key nats/kv:orders/o1
//
//	{"causes":[…]}
//
// The first line has the message's id, the others its metadata, a name and a value each. The payload follows an empty line.
package envelope

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/engine"
)

const mark = "windlass/1 "

// Seal makes a text of a message.
func Seal(m *message.Message) []byte {
	size := len(mark) + len(m.UUID) + 2 + len(m.Payload)
	for name, value := range m.Metadata {
		size += len(name) + len(value) + 2
	}
	b := append(append(append(make([]byte, 0, size), mark...), quoted(m.UUID)...), '\n')
	for name, value := range m.Metadata {
		b = append(append(b, quoted(name)...), ' ')
		b = append(append(b, quoted(value)...), '\n')
	}
	return append(append(b, '\n'), m.Payload...)
}

// quoted returns a text that is read as it is only if it is in quotation marks: a name must have no blank.
func quoted(text string) string {
	for i := range len(text) {
		if c := text[i]; c <= ' ' || c == '"' {
			return strconv.Quote(text)
		}
	}
	return text
}

func unquoted(text string) (string, error) {
	if !strings.HasPrefix(text, `"`) {
		return text, nil
	}
	return strconv.Unquote(text)
}

var errNone = errors.New("it is no message: the first line must be " + strconv.Quote(mark) + " and an id")

// Open is the reverse of Seal, and reads the JSON that was written before. The message holds on to data, and cannot be acked. Errors wrap
// engine.ErrMalformed.
func Open(data []byte) (*message.Message, error) {
	m, err := open(data)
	if err != nil && len(data) > 0 && data[0] == '{' {
		m, err = openJSON(data)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrMalformed, err)
	}
	return m, nil
}

func openJSON(data []byte) (*message.Message, error) {
	var former struct {
		ID       string           `json:"id"`
		Metadata message.Metadata `json:"meta"`
		Payload  []byte           `json:"data"`
	}
	if err := json.Unmarshal(data, &former); err != nil {
		return nil, err
	}
	m := &message.Message{UUID: former.ID, Metadata: make(message.Metadata, len(former.Metadata)), Payload: former.Payload}
	maps.Copy(m.Metadata, former.Metadata)
	return m, nil
}

func open(data []byte) (*message.Message, error) {
	rest, ok := strings.CutPrefix(string(data), mark)
	if !ok {
		return nil, errNone
	}
	m := &message.Message{Metadata: make(message.Metadata, 8)}
	for first := true; ; first = false {
		line, after, ok := strings.Cut(rest, "\n")
		if !ok {
			return nil, errors.New("it is cut short: no empty line ends the metadata")
		}
		rest = after
		if first {
			var err error
			if m.UUID, err = unquoted(line); err != nil {
				return nil, fmt.Errorf("id %s: %w", line, err)
			}
			continue
		}
		if line == "" {
			break
		}
		name, value, err := field(line)
		if err != nil {
			return nil, fmt.Errorf("metadata %s: %w", line, err)
		}
		m.Metadata[name] = value
	}
	m.Payload = data[len(data)-len(rest):]
	return m, nil
}

func field(line string) (name, value string, err error) {
	at := strings.IndexByte(line, ' ')
	if strings.HasPrefix(line, `"`) {
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			return "", "", err
		}
		at = len(quoted)
	}
	if at < 0 || at >= len(line) || line[at] != ' ' {
		return "", "", errors.New("no value")
	}
	if name, err = unquoted(line[:at]); err != nil {
		return "", "", err
	}
	value, err = unquoted(line[at+1:])
	return name, value, err
}
