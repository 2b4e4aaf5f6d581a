package k8s

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	clientv1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/windlass-dev/windlass/engine/kv"
)

// StoreLabel is on the ConfigMaps of a Store.
const StoreLabel = "windlass.dev/store"

// Store is a kv.Store in one namespace: a ConfigMap for each entry. It is for the little that an engine keeps (who owns what, what is
// held back), not for data: each entry costs the API server an object.
type Store struct {
	client clientv1.ConfigMapInterface
	name   string
}

var _ kv.Watcher = (*Store)(nil)

// NewStore returns the store of this name, of at most 63 letters, digits and dashes, in a namespace. The account needs get, list,
// watch, create, update and delete of configmaps there.
func NewStore(conn *Connection, namespace, name string) (*Store, error) {
	client, err := clientv1.NewForConfigAndClient(conn.config, conn.http)
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", name, err)
	}
	return &Store{client: client.ConfigMaps(namespace), name: name}, nil
}

// The fields of an entry's ConfigMap. Both hold any bytes.
const (
	keyField   = "key"
	valueField = "value"
)

func (s *Store) objectName(key string) string {
	sum := sha256.Sum256([]byte(s.name + "/" + key))
	return "windlass-" + hex.EncodeToString(sum[:20])
}

func (s *Store) object(key string, value []byte, revision string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: s.objectName(key), Labels: map[string]string{StoreLabel: s.name}, ResourceVersion: revision},
		BinaryData: map[string][]byte{keyField: []byte(key), valueField: value},
	}
}

func entryIn(m *corev1.ConfigMap) kv.Entry {
	return kv.Entry{Key: string(m.BinaryData[keyField]), Value: m.BinaryData[valueField], Revision: m.ResourceVersion}
}

// Get implements kv.Store.
func (s *Store) Get(ctx context.Context, key string) (kv.Entry, error) {
	m, err := s.client.Get(ctx, s.objectName(key), metav1.GetOptions{})
	if err != nil {
		return kv.Entry{}, explained(err)
	}
	return entryIn(m), nil
}

// Put implements kv.Store.
func (s *Store) Put(ctx context.Context, key string, value []byte, revision string) (string, error) {
	var m *corev1.ConfigMap
	var err error
	if revision == "" {
		m, err = s.client.Create(ctx, s.object(key, value, ""), metav1.CreateOptions{})
	} else {
		m, err = s.client.Update(ctx, s.object(key, value, revision), metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsNotFound(err): // it had this revision, and is gone
		return "", fmt.Errorf("%w: %w", kv.ErrConflict, err)
	case err != nil:
		return "", explained(err)
	}
	return m.ResourceVersion, nil
}

// Delete implements kv.Store.
func (s *Store) Delete(ctx context.Context, key, revision string) error {
	opts := metav1.DeleteOptions{}
	if revision != "" {
		opts.Preconditions = &metav1.Preconditions{ResourceVersion: &revision}
	}
	err := s.client.Delete(ctx, s.objectName(key), opts)
	if apierrors.IsNotFound(err) {
		return nil
	}
	return explained(err)
}

// List implements kv.Store.
func (s *Store) List(ctx context.Context, prefix string) ([]kv.Entry, error) {
	entries, _, err := s.list(ctx, prefix)
	return entries, err
}

func (s *Store) list(ctx context.Context, prefix string) (entries []kv.Entry, revision string, err error) {
	opts := metav1.ListOptions{LabelSelector: StoreLabel + "=" + s.name, Limit: 500}
	for {
		page, err := s.client.List(ctx, opts)
		if err != nil {
			return nil, "", explained(err)
		}
		for i := range page.Items {
			if e := entryIn(&page.Items[i]); strings.HasPrefix(e.Key, prefix) {
				entries = append(entries, e)
			}
		}
		if opts.Continue = page.Continue; opts.Continue == "" {
			return entries, page.ResourceVersion, nil
		}
	}
}

// Watch implements kv.Watcher.
func (s *Store) Watch(ctx context.Context, prefix string) (<-chan kv.Entry, error) {
	_, revision, err := s.list(ctx, prefix)
	if err != nil {
		return nil, err
	}
	w, err := s.client.Watch(ctx, metav1.ListOptions{LabelSelector: StoreLabel + "=" + s.name, ResourceVersion: revision})
	if err != nil {
		return nil, explained(err)
	}
	told := make(chan kv.Entry)
	go func() {
		defer close(told)
		defer w.Stop()
		for e := range w.ResultChan() {
			m, ok := e.Object.(*corev1.ConfigMap)
			if !ok {
				return // the server has forgotten what lies between
			}
			entry := entryIn(m)
			if entry.Deleted = e.Type == watch.Deleted; !strings.HasPrefix(entry.Key, prefix) {
				continue
			}
			select {
			case told <- entry:
			case <-ctx.Done():
				return
			}
		}
	}()
	return told, nil
}
