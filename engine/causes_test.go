package engine_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/windlass-dev/windlass/engine"
)

// TestCausesAreWrittenAndReadAsTheirJSON compares what is written by hand with what the encoder makes of the same, and what is read by hand with
// what the decoder reads: white space, which the writer never leaves, makes the reader leave it to the decoder.
func TestCausesAreWrittenAndReadAsTheirJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.SampledFrom([]string{"", "7", "a<b>&\"c\\", "é\x00\x7f\xff\u2028"}), rapid.StringN(0, 5, -1))
		cause := rapid.Custom(func(t *rapid.T) engine.Cause {
			x := engine.Cause{
				Trigger: engine.Trigger(rapid.IntRange(0, 6).Draw(t, "trigger")), Operation: engine.Operation(rapid.IntRange(0, 3).Draw(t, "operation")),
				Revision: text.Draw(t, "revision"), Incarnation: text.Draw(t, "incarnation"), Traceparent: text.Draw(t, "traceparent"),
				Time: time.Unix(0, rapid.Int64Range(1, 1<<62).Draw(t, "time")).UTC(),
			}
			if rapid.Bool().Draw(t, "dependency") {
				x.Key = engine.Key{Kind: engine.KindOf("k/ind"), Scope: text.Draw(t, "scope"), Name: "n" + text.Draw(t, "name")}
			}
			if rapid.IntRange(0, 9).Draw(t, "manual") == 0 {
				x.Trigger, x.Revision, x.Token = engine.Manual, "", text.Draw(t, "token")
			}
			return x
		})
		c := engine.CausesOf(rapid.SliceOfN(cause, 0, 12).Draw(t, "causes")...)
		if rapid.Bool().Draw(t, "partial") {
			c = c.Partial()
		}
		body := struct {
			Causes     []engine.Cause `json:"causes"`
			Count      int            `json:"count,omitempty"`
			Incomplete bool           `json:"incomplete,omitempty"`
		}{c.All(), 0, !c.Complete()}
		if c.Dropped() > 0 {
			body.Count = c.Count()
		}
		want, err := json.Marshal(body)
		require.NoError(t, err)
		got, err := json.Marshal(c)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))

		var byHand, decoded engine.Causes
		require.NoError(t, byHand.UnmarshalJSON(got))
		var spaced bytes.Buffer
		require.NoError(t, json.Indent(&spaced, got, "", " "))
		require.NoError(t, decoded.UnmarshalJSON(spaced.Bytes()))
		require.Equal(t, decoded.All(), byHand.All())
		require.Equal(t, decoded.Count(), byHand.Count())
		require.Equal(t, decoded.Complete(), byHand.Complete())
	})
}

func TestWhatIsNoCausesIsAnError(t *testing.T) {
	good := `{"causes":[{"trigger":"created","operation":"put","key":"k:n","revision":"7","time":"2026-01-02T03:04:05.000000006Z"}]}`
	for i := range len(good) {
		var c engine.Causes
		require.Error(t, c.UnmarshalJSON([]byte(good[:i])), good[:i])
	}
	for _, bad := range []string{
		good + "}", `{"causes":[{"trigger":"x","operation":"put","time":"2026-01-02T03:04:05Z"}]}`, `{"causes":[{"trigger":"created","operation":"x","time":"2026-01-02T03:04:05Z"}]}`,
		`{"causes":[{"trigger":"created","operation":"put","key":"k","time":"2026-01-02T03:04:05Z"}]}`, `{"causes":[{"trigger":"created","operation":"put","time":"now"}]}`,
	} {
		var c engine.Causes
		require.Error(t, c.UnmarshalJSON([]byte(bad)), bad)
	}
}
