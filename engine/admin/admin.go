// Package admin serves what an operator wants to know of an engine, as JSON over HTTP.
//
//	GET /api/v1/controllers                        the controllers
//	GET /api/v1/controllers/{controller}/items     its keys that are not idle, in all replicas (?limit= of each, 1,000)
//	GET /api/v1/controllers/{controller}/items/{key}  how one key stands, by the replica that works on it
//	GET /api/v1/members                            the replicas
//	GET /api/v1/partitions                         who works on what
package admin

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/windlass-dev/windlass/engine"
)

// Items is the answer to a request for items.
type Items struct {
	Items []engine.Explanation `json:"items"`
	// Total is how many there are; Items may be fewer.
	Total int `json:"total"`
	// Error says which replicas did not answer.
	Error string `json:"error,omitempty"`
}

// Problem is the answer to a request that failed.
type Problem struct {
	Error string `json:"error"`
}

// maxItems is how many items of a replica are told at most.
const maxItems = 1000

// Handler returns the API of an engine. With a tokenFile, requests must carry what it holds as a bearer token; it is read for
// each. Without one, only requests that name this machine as their host are answered, so that no web page can ask.
func Handler(e *engine.Engine, tokenFile string) http.Handler {
	mux := http.NewServeMux()
	get := func(path string, answer func(r *http.Request) (any, error)) {
		mux.HandleFunc("GET /api/v1/"+path, func(w http.ResponseWriter, r *http.Request) { reply(w, r, answer) })
	}
	get("controllers", func(*http.Request) (any, error) { return e.Controllers(), nil })
	get("members", func(*http.Request) (any, error) {
		members, _ := e.Replicas()
		return orEmpty(members), nil
	})
	get("partitions", func(*http.Request) (any, error) {
		_, partitions := e.Replicas()
		return orEmpty(partitions), nil
	})
	get("controllers/{controller}/items", func(r *http.Request) (any, error) {
		limit := maxItems
		if text := r.FormValue("limit"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > maxItems {
				return nil, fmt.Errorf("%w: limit %q is not between 1 and %d", engine.ErrInvalid, text, maxItems)
			}
			limit = n
		}
		items, total, err := e.ItemsAnywhere(r.Context(), r.PathValue("controller"), limit)
		if err != nil && items == nil {
			return nil, err
		}
		answer := Items{Items: items, Total: total}
		if err != nil {
			answer.Error = err.Error()
		}
		return answer, nil
	})
	get("controllers/{controller}/items/{key...}", func(r *http.Request) (any, error) {
		key, err := engine.ParseKey(r.PathValue("key"))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", engine.ErrInvalid, err)
		}
		return e.ExplainAnywhere(r.Context(), r.PathValue("controller"), key)
	})
	return authorized(mux, tokenFile)
}

// orEmpty keeps an empty list from being null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func reply(w http.ResponseWriter, r *http.Request, answer func(r *http.Request) (any, error)) {
	body, err := answer(r)
	switch {
	case err == nil:
		write(w, http.StatusOK, body)
	case errors.Is(err, engine.ErrNotFound):
		write(w, http.StatusNotFound, Problem{err.Error()})
	case errors.Is(err, engine.ErrInvalid):
		write(w, http.StatusBadRequest, Problem{err.Error()})
	default:
		write(w, http.StatusBadGateway, Problem{err.Error()})
	}
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // whoever asked is gone
}

func authorized(next http.Handler, tokenFile string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if tokenFile == "" {
			if !local(r.Host) {
				write(w, http.StatusForbidden, Problem{"without a token, only requests for localhost are answered"})
				return
			}
			next.ServeHTTP(w, r)
			return
		}
		want, err := os.ReadFile(tokenFile)
		got, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		token := strings.TrimSpace(string(want))
		if err != nil || token == "" || !bearer || subtle.ConstantTimeCompare([]byte(got), []byte(token)) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			write(w, http.StatusUnauthorized, Problem{"a bearer token is needed, the one in server.admin.tokenFile"})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Loopback says whether only this machine can reach an address.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && local(host)
}

func local(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
