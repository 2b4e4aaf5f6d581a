package engine

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/windlass-dev/windlass/internal/queue"
)

// The metadata of messages. Everything that routes or fences is metadata; the payload, in JSON, holds only what has no
// bound. A reader refuses a type that it does not know, so a change of meaning gets a new number.
const (
	metaType       = "windlass-type"
	metaSource     = "windlass-source"
	metaController = "windlass-controller"
	// MetadataKey is where messages carry their Key.
	MetadataKey     = "windlass-key"
	metaOperation   = "windlass-operation"
	metaRevision    = "windlass-revision"
	metaIncarnation = "windlass-incarnation"
	metaTime        = "windlass-time"
	metaRepaired    = "windlass-repaired"
	metaKnown       = "windlass-known"
	metaRoutedBy    = "windlass-routed-by"
	metaPriority    = "windlass-priority"
	metaDue         = "windlass-due"
	metaAttempt     = "windlass-attempt"
	metaDeletion    = "windlass-deletion"
	metaManual      = "windlass-manual"
	metaQuiet       = "windlass-quiet"
	metaTraceparent = "traceparent"
	// Watermill's own, for Pub/Subs that can delay.
	metaDelayedUntil = "_watermill_delayed_until"

	typeEvent   = "event/1"
	typeRequest = "request/1"
	typeState   = "state/1"
)

// EventTopic is the topic of a source's events.
func EventTopic(source string) string { return "events." + source }

// knownOf says in a word which metadata an event has, old and new, when both are empty.
func knownOf(e Event) string {
	switch {
	case e.Old != nil && e.New != nil:
		return "both"
	case e.Old != nil:
		return "old"
	case e.New != nil:
		return "new"
	default:
		return ""
	}
}

// empty says that there is nothing to tell but that there was an object.
func (m *Meta) empty() bool {
	return len(m.Labels) == 0 && len(m.Annotations) == 0 && len(m.Fields) == 0 && m.Owner.IsZero()
}

// nothingKnown is what is known of an object of which nothing is. Nobody changes what an event holds.
var nothingKnown Meta

// uuidSize is the length of a UUID as text.
const uuidSize = 36

// newUUID returns a random UUID. It identifies a message, and need not be unpredictable.
func newUUID() string { return string(appendUUID(make([]byte, 0, uuidSize))) }

func appendUUID(b []byte) []byte {
	var u [16]byte
	binary.LittleEndian.PutUint64(u[:], rand.Uint64())  //nolint:gosec // see above.
	binary.LittleEndian.PutUint64(u[8:], rand.Uint64()) //nolint:gosec // see above.
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	var h [32]byte
	hex.Encode(h[:], u[:])
	for i, part := range [...][]byte{h[:8], h[8:12], h[12:16], h[16:20], h[20:]} {
		if i > 0 {
			b = append(b, '-')
		}
		b = append(b, part...)
	}
	return b
}

type eventBody struct {
	Old *Meta `json:"old,omitempty"`
	New *Meta `json:"new,omitempty"`
}

// EncodeEvent makes a message of an event. RoutedBy names the engine that has routed it already, if one has.
func EncodeEvent(e Event, routedBy string) (*message.Message, error) {
	var payload []byte
	known := ""
	switch {
	case (e.Old == nil || e.Old.empty()) && (e.New == nil || e.New.empty()):
		known = knownOf(e)
	default:
		var err error
		if payload, err = json.Marshal(eventBody{e.Old, e.New}); err != nil {
			return nil, fmt.Errorf("encode event of %s: %w", e.Key, err)
		}
	}
	// Not NewMessage: whoever is handed the message gets a copy, which has the channels of its ack. This one is never acked.
	m := &message.Message{Metadata: make(message.Metadata, 8), Payload: payload}
	// One piece of memory for the texts that are made here.
	text := appendUUID(make([]byte, 0, 192))
	text = e.Time.UTC().AppendFormat(text, time.RFC3339Nano)
	keyAt := len(text)
	if !e.Key.IsZero() {
		text = e.Key.appendTo(text)
	}
	made := string(text)
	m.UUID = made[:uuidSize]
	m.Metadata[metaType] = typeEvent
	set(m, metaKnown, known)
	m.Metadata[metaSource] = e.Source
	m.Metadata[metaOperation] = e.Operation.String()
	m.Metadata[metaTime] = made[uuidSize:keyAt]
	set(m, MetadataKey, made[keyAt:])
	if e.Repaired {
		m.Metadata[metaRepaired] = "true"
	}
	set(m, metaRevision, e.Revision)
	set(m, metaIncarnation, e.Incarnation)
	set(m, metaTraceparent, e.Traceparent)
	set(m, metaRoutedBy, routedBy)
	return m, nil
}

func set(m *message.Message, key, value string) {
	if value != "" {
		m.Metadata[key] = value
	}
}

// DecodeEvent is the reverse of EncodeEvent. Its errors wrap ErrMalformed.
func DecodeEvent(m *message.Message) (e Event, routedBy string, err error) {
	d := decoder{m: m}
	d.version(typeEvent)
	e = Event{
		Source: m.Metadata[metaSource], Key: d.key(true), Incarnation: m.Metadata[metaIncarnation],
		Revision: m.Metadata[metaRevision], Time: d.time(metaTime), Traceparent: m.Metadata[metaTraceparent],
		Repaired: m.Metadata[metaRepaired] == "true",
	}
	e.Operation = named(&d, operations, metaOperation)
	if e.Key.IsZero() && e.Operation != ListStarted && e.Operation != ListEnded {
		d.fail("%s: a %s event without a key", MetadataKey, e.Operation)
	}
	switch m.Metadata[metaKnown] {
	case "old":
		e.Old = &nothingKnown
	case "new":
		e.New = &nothingKnown
	case "both":
		e.Old, e.New = &nothingKnown, &nothingKnown
	default:
		var body eventBody
		d.json(&body)
		e.Old, e.New = body.Old, body.New
	}
	return e, m.Metadata[metaRoutedBy], d.err
}

// newMessage is message.NewMessage for one that is not acked itself: whoever is handed it gets a copy.
func newMessage(payload []byte) *message.Message {
	return &message.Message{UUID: newUUID(), Metadata: make(message.Metadata, 8), Payload: payload}
}

// EncodeRequest makes a message of a request.
func EncodeRequest(r Request) (*message.Message, error) {
	payload, err := r.Causes.of(nil).appendJSON(make([]byte, 0, 192))
	if err != nil {
		return nil, fmt.Errorf("encode request for %s: %w", r.Key, err)
	}
	m := newMessage(payload)
	m.Metadata[metaType] = typeRequest
	m.Metadata[metaController] = r.Controller
	m.Metadata[MetadataKey] = r.Key.String()
	m.Metadata[metaPriority] = r.Priority.String()
	if !r.Due.IsZero() {
		setDue(m, r.Due)
	}
	if r.Manual {
		m.Metadata[metaManual] = "true"
	}
	if r.Deletion {
		m.Metadata[metaDeletion] = "true"
	}
	if r.quiet != 0 {
		m.Metadata[metaQuiet] = moment(r.quiet).Format(time.RFC3339Nano)
	}
	set(m, metaTraceparent, r.Causes.Newest().Traceparent)
	return m, nil
}

func setDue(m *message.Message, due time.Time) {
	at := due.UTC().Format(time.RFC3339Nano)
	m.Metadata[metaDue], m.Metadata[metaDelayedUntil] = at, at
}

// DecodeRequest is the reverse of EncodeRequest. Its errors wrap ErrMalformed.
func DecodeRequest(m *message.Message) (Request, error) {
	d := decoder{m: m}
	d.version(typeRequest)
	r := Request{
		Controller: m.Metadata[metaController], Key: d.key(false), Due: d.time(metaDue),
		Manual: m.Metadata[metaManual] == "true", Deletion: m.Metadata[metaDeletion] == "true", quiet: nanos(d.time(metaQuiet)),
	}
	r.Priority = named(&d, priorities, metaPriority)
	if len(m.Payload) > 0 {
		if err := r.Causes.UnmarshalJSON(m.Payload); err != nil {
			d.fail("payload: %w", err)
		}
	}
	return r, d.err
}

// stateBody is the part of a state record that is not metadata.
type stateBody struct {
	Causes      Causes    `json:"causes"`
	NotBefore   time.Time `json:"notBefore,omitzero"`
	Retry       bool      `json:"retry,omitempty"`
	Priority    Priority  `json:"priority"`
	Later       time.Time `json:"later,omitzero"`
	LaterCauses Causes    `json:"laterCauses,omitzero"`
	Parked      bool      `json:"parked,omitempty"`
	Error       string    `json:"error,omitempty"`
}

// maxErrorText bounds the error that is kept with a key.
const maxErrorText = 4 << 10

// EncodeState makes a message of a key's state: the delayed request, or the parked one.
func EncodeState(controller string, s queue.State[Key, Causes]) (*message.Message, error) {
	body := stateBody{
		Causes: s.Value.of(nil), NotBefore: moment(s.NotBefore), Retry: s.Retry, Priority: Priority(s.Class),
		Later: moment(s.Later), LaterCauses: s.LaterValue.of(nil), Parked: s.Parked, Error: s.Err,
	}
	if len(body.Error) > maxErrorText {
		body.Error = body.Error[:maxErrorText] + "…"
	}
	payload, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode state of %s: %w", s.Key, err)
	}
	m := newMessage(payload)
	m.Metadata[metaType] = typeState
	m.Metadata[metaController] = controller
	m.Metadata[MetadataKey] = s.Key.String()
	m.Metadata[metaAttempt] = strconv.Itoa(s.Attempt)
	if s.Due != 0 {
		setDue(m, moment(s.Due))
	}
	set(m, metaTraceparent, s.Value.Newest().Traceparent)
	return m, nil
}

// DecodeState is the reverse of EncodeState. Its errors wrap ErrMalformed.
func DecodeState(m *message.Message) (queue.State[Key, Causes], error) {
	d := decoder{m: m}
	d.version(typeState)
	var body stateBody
	d.json(&body)
	s := queue.State[Key, Causes]{
		Key: d.key(false), Value: body.Causes, Attempt: d.number(metaAttempt), Due: nanos(d.time(metaDue)),
		NotBefore: nanos(body.NotBefore), Retry: body.Retry, Class: queue.Class(body.Priority),
		Later: nanos(body.Later), LaterValue: body.LaterCauses, Parked: body.Parked, Err: body.Error,
	}
	return s, d.err
}

func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// decoder reads a message and keeps the first thing that is wrong with it.
type decoder struct {
	m   *message.Message
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %w", ErrMalformed, fmt.Errorf(format, args...))
	}
}

func (d *decoder) version(want string) {
	if got := d.m.Metadata[metaType]; got != want {
		d.fail("%s is %q, want %q", metaType, got, want)
	}
}

func (d *decoder) key(optional bool) Key {
	s := d.m.Metadata[MetadataKey]
	if s == "" && optional {
		return Key{}
	}
	k, err := ParseKey(s)
	if err != nil {
		d.fail("%s: %w", MetadataKey, err)
	}
	return k
}

func (d *decoder) time(name string) time.Time {
	s := d.m.Metadata[name]
	if s == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		d.fail("%s: %w", name, err)
	}
	return t
}

func (d *decoder) number(name string) int {
	n, err := strconv.Atoi(d.m.Metadata[name])
	if err != nil || n < 0 {
		d.fail("%s is %q, want a count", name, d.m.Metadata[name])
	}
	return n
}

func named[T ~uint8](d *decoder, of names[T], name string) T {
	v, err := of.parse(name, d.m.Metadata[name])
	if err != nil {
		d.fail("%w", err)
	}
	return v
}

func (d *decoder) json(into any) {
	if len(d.m.Payload) == 0 {
		return
	}
	if err := json.Unmarshal(d.m.Payload, into); err != nil {
		d.fail("payload: %w", err)
	}
}
