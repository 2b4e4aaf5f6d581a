package engine

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"
)

// causesBody is how causes are written.
type causesBody struct {
	Causes     []Cause `json:"causes"`
	Count      int     `json:"count,omitempty"`
	Incomplete bool    `json:"incomplete,omitempty"`
	// Lineage holds the runs that a cause comes of, by its place among the causes, so that a key that causes itself is found.
	Lineage map[int][]ancestorBody `json:"lineage,omitempty"`
}

type ancestorBody struct {
	Controller string `json:"controller"`
	Key        Key    `json:"key"`
	Loops      int    `json:"loops,omitempty"`
}

// MarshalJSON writes the causes and how many there were.
func (c Causes) MarshalJSON() ([]byte, error) { return c.appendJSON(nil) }

// appendJSON writes what the JSON of a causesBody would be. On a durable bus every request is written and read, and reflection was a tenth of
// what that costs.
func (c Causes) appendJSON(b []byte) ([]byte, error) {
	lineage := c.lineage()
	if len(lineage) > 0 || c.Count() == 0 {
		body := causesBody{Causes: c.All(), Incomplete: !c.Complete(), Lineage: lineage}
		if c.Dropped() > 0 {
			body.Count = c.Count()
		}
		text, err := json.Marshal(body)
		return append(b, text...), err
	}
	b = append(b, `{"causes":[`...)
	for i := range 1 + len(c.rest) {
		x := &c.first
		if i > 0 {
			x = &c.rest[i-1]
			b = append(b, ',')
		}
		b = x.expand(c.own).appendJSON(b)
	}
	b = append(b, ']')
	if c.Dropped() > 0 {
		b = strconv.AppendInt(append(b, `,"count":`...), int64(c.Count()), 10)
	}
	if !c.Complete() {
		b = append(b, `,"incomplete":true`...)
	}
	return append(b, '}'), nil
}

// lineage is what causesBody holds of it.
func (c Causes) lineage() (all map[int][]ancestorBody) {
	i := 0
	for x := range c.each {
		if by := x.by(); by != nil {
			if all == nil {
				all = make(map[int][]ancestorBody)
			}
			for _, r := range by.runs {
				all[i] = append(all[i], ancestorBody{r.controller, r.key, r.loops})
			}
		}
		i++
	}
	return all
}

func (x Cause) appendJSON(b []byte) []byte {
	b = append(append(b, `{"trigger":"`...), x.Trigger.String()...)
	b = append(append(b, `","operation":"`...), x.Operation.String()...)
	b = append(b, '"')
	if !x.Key.IsZero() {
		b = appendText(append(b, `,"key":`...), x.Key.String())
	}
	optional := func(name, text string) {
		if text != "" {
			b = appendText(append(b, name...), text)
		}
	}
	optional(`,"revision":`, x.Revision)
	optional(`,"incarnation":`, x.Incarnation)
	b = append(x.Time.AppendFormat(append(b, `,"time":"`...), time.RFC3339Nano), '"')
	optional(`,"traceparent":`, x.Traceparent)
	optional(`,"token":`, x.Token)
	return append(b, '}')
}

// plainText says that a character stands for itself between quotation marks, whoever writes JSON.
func plainText(c byte) bool {
	return ' ' <= c && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if !plainText(s[i]) {
			text, err := json.Marshal(s)
			if err != nil {
				panic(err) // a string
			}
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// UnmarshalJSON is the reverse of MarshalJSON.
func (c *Causes) UnmarshalJSON(data []byte) error {
	if read, ok := readCauses(string(data)); ok {
		*c = read
		return nil
	}
	var body causesBody
	if err := json.Unmarshal(data, &body); err != nil {
		return err
	}
	*c = Causes{}
	for i, x := range body.Causes {
		read := compact(x)
		if runs := body.Lineage[i]; len(runs) > 0 {
			by := &ancestry{}
			for _, r := range runs[max(0, len(runs)-lineageDepth):] {
				by.runs = append(by.runs, ancestor{r.Controller, r.Key, max(r.Loops, 0)})
			}
			read = read.withMore(causeMore{key: x.Key, traceparent: x.Traceparent, by: by})
		}
		c.add(read)
	}
	if len(body.Causes) > 0 {
		c.n = max(c.n, int32(min(body.Count, math.MaxInt32))) //nolint:gosec // bounded here.
	}
	if body.Incomplete {
		*c = c.Partial()
	}
	return nil
}

// readCauses reads one cause, or several, exactly as appendJSON writes them. Whatever else it is, false, is for the JSON decoder to say.
func readCauses(text string) (c Causes, ok bool) {
	r := causesReader{text: text}
	if !r.next(`{"causes":[`) {
		return Causes{}, false
	}
	for {
		x, ok := r.cause()
		if !ok {
			return Causes{}, false
		}
		c.add(compact(x))
		if !r.next(",") {
			break
		}
	}
	return c, r.next("]}") && r.text == ""
}

type causesReader struct{ text string }

func (r *causesReader) next(what string) (found bool) {
	r.text, found = strings.CutPrefix(r.text, what)
	return found
}

// string reads what stands behind a name, if that is what comes.
func (r *causesReader) string(name string) (text string, ok bool) {
	if !r.next(name) {
		return "", false
	}
	for i := range len(r.text) {
		if r.text[i] == '"' {
			text, r.text = r.text[:i], r.text[i+1:]
			return text, true
		}
		if !plainText(r.text[i]) {
			break
		}
	}
	return "", false
}

func (r *causesReader) cause() (x Cause, ok bool) {
	trigger, ok1 := r.string(`{"trigger":"`)
	operation, ok2 := r.string(`,"operation":"`)
	if !ok1 || !ok2 {
		return x, false
	}
	var errs [4]error
	x.Trigger, errs[0] = triggers.parse("trigger", trigger)
	x.Operation, errs[1] = operations.parse("operation", operation)
	if key, ok := r.string(`,"key":"`); ok {
		x.Key, errs[2] = ParseKey(key)
	}
	x.Revision, _ = r.string(`,"revision":"`)
	x.Incarnation, _ = r.string(`,"incarnation":"`)
	at, ok := r.string(`,"time":"`)
	x.Time, errs[3] = time.Parse(time.RFC3339Nano, at)
	x.Traceparent, _ = r.string(`,"traceparent":"`)
	x.Token, _ = r.string(`,"token":"`)
	for _, err := range errs {
		ok = ok && err == nil
	}
	return x, ok && r.next("}")
}
