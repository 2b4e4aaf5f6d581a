package nats

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/windlass-dev/windlass/engine"
)

const hexDigits = "0123456789ABCDEF"

// token writes s as one token of a subject: any text, reversibly. The empty text is a single "=".
func token(s string) string {
	if s == "" {
		return "="
	}
	var b strings.Builder
	b.Grow(len(s))
	for i := range len(s) {
		c := s[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('=')
		b.WriteByte(hexDigits[c>>4])
		b.WriteByte(hexDigits[c&15])
	}
	return b.String()
}

// maxKeyTokens bounds the part of a subject that a key takes; the rest of a longer key is a hash, and the key itself is
// in a header.
const maxKeyTokens = 512

// keyTokens returns the tokens of a key and what its partition is computed from.
func keyTokens(k engine.Key) string {
	scope, kind, ns, name := token(k.Scope), token(k.Kind.String()), token(k.Namespace), token(k.Name)
	if len(scope)+len(kind)+len(ns)+len(name) > maxKeyTokens {
		sum := sha256.Sum256([]byte(k.Name))
		name = "=H" + hex.EncodeToString(sum[:])
		if len(scope)+len(kind)+len(ns)+len(name) > maxKeyTokens {
			sum := sha256.Sum256([]byte(k.Namespace))
			ns = "=H" + hex.EncodeToString(sum[:])
		}
	}
	return scope + "." + kind + "." + ns + "." + name
}

// partition is FNV-1a over the key's tokens without their dots, as the server's own partition() computes it.
func partition(keyTokens string, partitions int) int {
	h := fnv.New32a()
	for t := range strings.SplitSeq(keyTokens, ".") {
		_, _ = h.Write([]byte(t)) // a hash.Hash never fails
	}
	return int(h.Sum32() % uint32(partitions)) //nolint:gosec // partitions is validated to be small and positive.
}

func requestStream(eng, controller string) string {
	return fmt.Sprintf("RQ_%s_%s", token(eng), token(controller))
}
func stateStream(eng string) string        { return "RQS_" + token(eng) }
func coordinationStream(eng string) string { return "RQC_" + token(eng) }
func eventStream(eng string) string        { return "EV_" + token(eng) }
func deadStream(eng string) string         { return "DEAD_" + token(eng) }
func storeBucket(eng string) string        { return "windlass_" + token(eng) }

// untoken is the reverse of token.
func untoken(t string) (string, error) {
	if t == "=" {
		return "", nil
	}
	var b strings.Builder
	for i := 0; i < len(t); i++ {
		if t[i] != '=' {
			b.WriteByte(t[i])
			continue
		}
		if i+2 >= len(t) {
			return "", fmt.Errorf("token %q is cut short", t)
		}
		c, err := hex.DecodeString(t[i+1 : i+3])
		if err != nil {
			return "", fmt.Errorf("token %q: %w", t, err)
		}
		b.WriteByte(c[0])
		i += 2
	}
	return b.String(), nil
}
