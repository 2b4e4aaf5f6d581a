package envelope_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/envelope"
)

func TestWhatIsSealedIsOpenedUnchanged(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.SampledFrom([]string{"", " ", "\n", "\"", "a b", "a\nb", `\"`, "windlass-key", "é\xff\x00"}), rapid.String())
		m := message.NewMessage(text.Draw(t, "id"), rapid.SliceOf(rapid.Byte()).Draw(t, "payload"))
		m.Metadata = rapid.MapOf(text.Filter(func(s string) bool { return s != "" }), text).Draw(t, "metadata")
		got, err := envelope.Open(envelope.Seal(m))
		require.NoError(t, err)
		require.Equal(t, m.UUID, got.UUID)
		require.Equal(t, m.Metadata, got.Metadata)
		require.Equal(t, string(m.Payload), string(got.Payload))
	})
}

func TestWhatIsNoMessageIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "it is no message",
		`{"id":1}`:                    "cannot unmarshal number",
		"windlass/2 x\n\n":            "it is no message",
		"windlass/1 x":                "it is cut short",
		"windlass/1 x\na b\n":         "it is cut short",
		"windlass/1 x\na\n\n":         "metadata a: no value",
		"windlass/1 x\n\"a\n\n":       "metadata \"a: invalid syntax",
		"windlass/1 x\n\"a\"\n\n":     "metadata \"a\": no value",
		"windlass/1 x\n\"a\"b\n\n":    "metadata \"a\"b: no value",
		"windlass/1 x\na \"b\n\n":     "metadata a \"b: invalid syntax",
		"windlass/1 \"x\n\n":          "id \"x: invalid syntax",
		"windlass/1 x\n\"\\x\" b\n\n": "invalid syntax",
	} {
		_, err := envelope.Open([]byte(text))
		require.ErrorContains(t, err, want, text)
		require.ErrorIs(t, err, engine.ErrMalformed)
	}
	m, err := envelope.Open([]byte("windlass/1 x\nname a value\n\npay\n\nload"))
	require.NoError(t, err, "a value may have blanks")
	require.Equal(t, "a value", m.Metadata["name"])
	require.Equal(t, "pay\n\nload", string(m.Payload))
	m, err = envelope.Open([]byte(`{"id":"x","meta":{"name":"value"},"data":"cGF5bG9hZA=="}`))
	require.NoError(t, err, "as it was written before")
	require.Equal(t, "value", m.Metadata["name"])
	require.Equal(t, "payload", string(m.Payload))
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte("windlass/1 x\na b\n\npayload"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := envelope.Open(data)
		if err != nil {
			return
		}
		again, err := envelope.Open(envelope.Seal(m))
		require.NoError(t, err)
		require.Equal(t, m.Metadata, again.Metadata)
		require.Equal(t, string(m.Payload), string(again.Payload))
	})
}
