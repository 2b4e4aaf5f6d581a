package admin_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/engine/admin"
	"github.com/windlass-dev/windlass/engine/enginetest"
	"github.com/windlass-dev/windlass/sources/memory"
)

// ask asks a handler, and decodes the answer.
func ask[T any](t *testing.T, h http.Handler, path string, status int, change ...func(*http.Request)) T {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	r.Host = "localhost:8090"
	for _, f := range change {
		f(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, status, w.Code, w.Body.String())
	require.Equal(t, "application/json", w.Header().Get("Content-Type"))
	var out T
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &out))
	return out
}

func TestAnswers(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		things := memory.New[int]("things")
		for _, name := range []string{"a/b", "c", "fine"} {
			things.Set(name, 1)
		}
		h.Start(engine.NewController("c").For(things).WithHandler(func(_ context.Context, _ engine.Runtime, req engine.Request) (engine.Result, error) {
			if req.Key.Name == "fine" {
				return engine.Result{}, nil
			}
			return engine.Result{}, engine.Terminal(os.ErrInvalid)
		}))
		synctest.Wait()
		api := admin.Handler(h.Engine, "")
		require.Equal(h.T, []string{"c"}, ask[[]string](h.T, api, "/api/v1/controllers", 200))
		require.Equal(h.T, []engine.Member{}, ask[[]engine.Member](h.T, api, "/api/v1/members", 200))
		require.Equal(h.T, []engine.Partition{}, ask[[]engine.Partition](h.T, api, "/api/v1/partitions", 200))

		items := ask[admin.Items](h.T, api, "/api/v1/controllers/c/items", 200)
		require.Equal(h.T, 2, items.Total)
		require.Equal(h.T, things.Key("a/b"), items.Items[0].Key)
		require.Equal(h.T, "parked", items.Items[0].State)
		require.Len(h.T, ask[admin.Items](h.T, api, "/api/v1/controllers/c/items?limit=1", 200).Items, 1)
		x := ask[engine.Explanation](h.T, api, "/api/v1/controllers/c/items/"+url.PathEscape(things.Key("a/b").String()), 200)
		require.Equal(h.T, "parked", x.State)
		require.Len(h.T, x.Runs, 1)
		require.Equal(h.T, "idle", ask[engine.Explanation](h.T, api, "/api/v1/controllers/c/items/"+things.Key("fine").String(), 200).State)

		require.Contains(h.T, ask[admin.Problem](h.T, api, "/api/v1/controllers/c/items?limit=x", 400).Error, `limit "x"`)
		require.Contains(h.T, ask[admin.Problem](h.T, api, "/api/v1/controllers/c/items/nonsense", 400).Error, "nonsense")
		require.Contains(h.T, ask[admin.Problem](h.T, api, "/api/v1/controllers/other/items", 404).Error, "other")
	})
}

func TestWhoMayAsk(t *testing.T) {
	enginetest.Run(t, func(h *enginetest.Harness) {
		h.Start(engine.NewController("c").For(memory.New[int]("things")).WithHandler(
			func(context.Context, engine.Runtime, engine.Request) (engine.Result, error) {
				return engine.Result{}, nil
			}))
		api := admin.Handler(h.Engine, "")
		for _, host := range []string{"localhost", "127.0.0.1:8090", "[::1]:8090"} {
			ask[[]string](h.T, api, "/api/v1/controllers", 200, func(r *http.Request) { r.Host = host })
		}
		ask[admin.Problem](h.T, api, "/api/v1/controllers", 403, func(r *http.Request) { r.Host = "evil.example" })

		file := filepath.Join(h.T.TempDir(), "token")
		api = admin.Handler(h.Engine, file)
		with := func(token string) func(*http.Request) {
			return func(r *http.Request) { r.Host = "engine.example"; r.Header.Set("Authorization", "Bearer "+token) }
		}
		ask[admin.Problem](h.T, api, "/api/v1/controllers", 401, with("")) // there is no file
		require.NoError(h.T, os.WriteFile(file, nil, 0o600))
		ask[admin.Problem](h.T, api, "/api/v1/controllers", 401, with(""))
		require.NoError(h.T, os.WriteFile(file, []byte("sesame\n"), 0o600))
		ask[admin.Problem](h.T, api, "/api/v1/controllers", 401)
		ask[admin.Problem](h.T, api, "/api/v1/controllers", 401, with("wrong"))
		ask[[]string](h.T, api, "/api/v1/controllers", 200, with("sesame"))
	})
	require.True(t, admin.Loopback("127.0.0.1:1"))
	require.True(t, admin.Loopback("localhost:1"))
	require.False(t, admin.Loopback(":1"))
	require.False(t, admin.Loopback("0.0.0.0:1"))
}
