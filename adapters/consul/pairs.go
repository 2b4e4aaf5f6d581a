package consul

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/hashicorp/consul/api"
)

// pairs is an answer of Consul's KV store, which has all keys under a prefix whenever one of them has changed. Decoding ten thousand takes
// as long as all the rest together, so only what differs from the last answer is decoded.
type pairs struct {
	body  []byte
	items map[string]item
	// skip says which keys are left out. Nil is none.
	skip func(key string) bool
}

// boundary is what lies between two elements. It is nowhere else: within a text, its quotation mark would be escaped.
var boundary = []byte(`},{"`)

// take makes body the present answer and returns the names of which something may have changed. It returns them all the first time.
func (p *pairs) take(body []byte) (changed []string, err error) {
	before, after := p.body, body
	if p.items == nil {
		p.items = make(map[string]item)
		before = nil
	} else {
		before, after = differing(before, after)
	}
	var gone, come api.KVPairs
	if err := decode(before, &gone); err != nil {
		return nil, err
	}
	if err := decode(after, &come); err != nil {
		return nil, err
	}
	for _, x := range gone {
		delete(p.items, x.Key)
		changed = append(changed, x.Key)
	}
	for _, x := range come {
		if p.skip == nil || !p.skip(x.Key) {
			p.items[x.Key] = item{revisionOf(x.ModifyIndex), revisionOf(x.CreateIndex), meta}
			changed = append(changed, x.Key)
		}
	}
	p.body = body
	slices.Sort(changed)
	return slices.Compact(changed), nil
}

func decode(array []byte, into *api.KVPairs) error {
	if len(array) == 0 {
		return nil
	}
	return json.Unmarshal(array, into)
}

// differing returns arrays of the elements of a and of b that are not the same in both, and of some that are.
func differing(a, b []byte) (x, y []byte) {
	if len(a) == 0 || len(b) == 0 {
		return a, b
	}
	shorter := min(len(a), len(b))
	prefix := 0
	for prefix < shorter && a[prefix] == b[prefix] {
		prefix++
	}
	suffix := 0
	for suffix < shorter-prefix && a[len(a)-1-suffix] == b[len(b)-1-suffix] {
		suffix++
	}
	start := 1 // behind the bracket
	if i := bytes.LastIndex(b[:prefix], boundary); i >= 0 {
		start = i + len("},")
	}
	end := suffix - bytes.LastIndexByte(b[len(b)-suffix:], ']') // counted from behind
	if i := bytes.Index(b[len(b)-suffix:], boundary); i >= 0 {
		end = suffix - i - len("}")
	} else if bytes.LastIndexByte(b[len(b)-suffix:], ']') < 0 {
		return a, b // no array, or an empty one
	}
	if start > len(a)-end || start > len(b)-end {
		return a, b
	}
	return array(a[start : len(a)-end]), array(b[start : len(b)-end])
}

func array(elements []byte) []byte {
	return append(append(append(make([]byte, 0, len(elements)+2), '['), elements...), ']')
}
