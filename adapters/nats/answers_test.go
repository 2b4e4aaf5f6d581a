package nats

import (
	"testing"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"
)

func TestAnswersOfTheServerAreRead(t *testing.T) {
	for text, want := range map[string]uint64{
		`{"stream":"RQ_shop_c","seq":7}`:                                                         7,
		`{"stream":"RQ_shop_c","domain":"d","seq":18446744073709551615}`:                         18446744073709551615,
		`{"type":"x","stream":"\"seq\":1","seq":12,"duplicate":true}`:                            12,
		`{"stream":"RQ_shop_c", "seq": 9}`:                                                       9,
		`{"error":{"code":400,"err_code":10071,"description":"x"},"stream":"RQ_shop_c","seq":0}`: 0,
	} {
		seq, err := stored(&natsgo.Msg{Data: []byte(text)})
		require.Equal(t, want, seq, text)
		if want == 0 {
			var api *jetstream.APIError
			require.ErrorAs(t, err, &api)
			require.Equal(t, codeWrongLastSequence, api.ErrorCode)
			continue
		}
		require.NoError(t, err, text)
	}
	for _, text := range []string{"", "{}", `{"seq":7`, `{"seq":-7}`, `{"seq":18446744073709551616,"stream":"x"}`, "x"} {
		seq, err := stored(&natsgo.Msg{Data: []byte(text)})
		if text == `{"seq":7` {
			require.NoError(t, err, "the number is what counts")
			require.EqualValues(t, 7, seq)
			continue
		}
		require.ErrorIs(t, err, jetstream.ErrInvalidJSAck, text)
	}
	_, err := stored(&natsgo.Msg{Header: natsgo.Header{"Status": {"503"}}})
	require.ErrorIs(t, err, natsgo.ErrNoResponders)
}
