package engine

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
	"unique"
)

// Kind is a sort of resource in one system, its API version left out: "k8s/apps/Deployment", "nats/kv". It is
// interned: it takes one word and compares as fast as one. The zero Kind is the empty name.
type Kind struct{ name unique.Handle[string] }

// KindOf returns the Kind with this name.
func KindOf(name string) Kind {
	if name == "" {
		return Kind{}
	}
	return Kind{unique.Make(name)}
}

// String returns the name.
func (k Kind) String() string {
	if k == (Kind{}) {
		return ""
	}
	return k.name.Value()
}

// Key names one resource in one system. It is comparable, holds no incarnation (UID) and no version, and is printed as
// kind[@scope]:[namespace/]name, percent-escaped; [ParseKey] reads that back.
type Key struct {
	Kind Kind
	// Scope is the name of the connection: which cluster, account or Consul. Empty where there is only one.
	Scope     string
	Namespace string
	Name      string
}

// IsZero says that k names nothing.
func (k Key) IsZero() bool { return k == Key{} }

// String prints k so that ParseKey returns it unchanged, whatever bytes it holds.
func (k Key) String() string { return string(k.appendTo(make([]byte, 0, 128))) }

func (k Key) appendTo(b []byte) []byte {
	b = escape(b, k.Kind.String(), "/")
	if k.Scope != "" {
		b = escape(append(b, '@'), k.Scope, "")
	}
	b = append(b, ':')
	if k.Namespace != "" {
		b = append(escape(b, k.Namespace, ""), '/')
	}
	return escape(b, k.Name, "")
}

// MarshalText makes keys readable in JSON and logs.
func (k Key) MarshalText() ([]byte, error) {
	if k.IsZero() {
		return nil, nil
	}
	return []byte(k.String()), nil
}

// UnmarshalText is the reverse of MarshalText.
func (k *Key) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*k = Key{}
		return nil
	}
	parsed, err := ParseKey(string(text))
	if err != nil {
		return err
	}
	*k = parsed
	return nil
}

// ParseKey reads a key as Key.String prints it. Its errors say which part is wrong.
func ParseKey(s string) (Key, error) {
	fail := func(err error) (Key, error) {
		return Key{}, fmt.Errorf("key %q: %w; want kind[@scope]:[namespace/]name", s, err)
	}
	head, tail, ok := strings.Cut(s, ":")
	if !ok {
		return fail(errors.New("no colon after the kind"))
	}
	kind, scope, scoped := strings.Cut(head, "@")
	namespace, name, namespaced := strings.Cut(tail, "/")
	if !namespaced {
		namespace, name = "", tail
	}
	var err error
	plain := func(what, part string, required bool) string {
		text, err2 := unescape(part)
		switch {
		case err != nil:
		case err2 != nil:
			err = fmt.Errorf("%s: %w", what, err2)
		case required && text == "":
			err = fmt.Errorf("the %s is empty", what)
		}
		return text
	}
	k := Key{Scope: plain("scope", scope, scoped), Namespace: plain("namespace", namespace, namespaced), Name: plain("name", name, true)}
	kind = plain("kind", kind, true)
	if err != nil {
		return fail(err)
	}
	k.Kind = KindOf(kind)
	return k, nil
}

const hexDigits = "0123456789ABCDEF"

// escape appends s with every byte escaped that would be read as structure or that does not print.
func escape(b []byte, s, keep string) []byte {
	for i := 0; i < len(s); {
		// Letters, digits and what else is plain in ASCII are written in one go.
		if n := plainPrefix(s[i:]); n > 0 {
			b = append(b, s[i:i+n]...)
			i += n
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		structural := r == '%' || r == ':' || r == '@' || r == '/'
		if r == utf8.RuneError && n == 1 || !unicode.IsGraphic(r) || r == ' ' || structural && !strings.ContainsRune(keep, r) {
			for _, c := range []byte(s[i : i+n]) {
				b = append(b, '%', hexDigits[c>>4], hexDigits[c&15])
			}
		} else {
			b = append(b, s[i:i+n]...)
		}
		i += n
	}
	return b
}

// plainPrefix is how many bytes at the start of s are printable ASCII without a meaning in keys.
func plainPrefix(s string) int {
	for i := range len(s) {
		switch c := s[i]; {
		case c <= ' ', c >= 0x7f, c == '%', c == ':', c == '@', c == '/':
			return i
		}
	}
	return len(s)
}

func unescape(s string) (string, error) {
	if !strings.Contains(s, "%") {
		return s, nil
	}
	var b strings.Builder
	b.Grow(len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		if i+2 >= len(s) {
			return "", fmt.Errorf("%q is cut short", s[i:])
		}
		hi, lo := strings.IndexByte(hexDigits, upper(s[i+1])), strings.IndexByte(hexDigits, upper(s[i+2]))
		if hi < 0 || lo < 0 {
			return "", fmt.Errorf("%q is not a hexadecimal escape", s[i:i+3])
		}
		b.WriteByte(byte(hi<<4 | lo)) //nolint:gosec // two digits of four bits.
		i += 2
	}
	return b.String(), nil
}

func upper(c byte) byte {
	if 'a' <= c && c <= 'z' {
		return c - 'a' + 'A'
	}
	return c
}
