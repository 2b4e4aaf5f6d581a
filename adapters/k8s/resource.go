package k8s

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/nearest"
)

// What a resource keeps in memory.
const (
	CacheMetadata = "metadata"
	CacheFields   = "fields"
	CacheFull     = "full"
)

// ResourceConfig names a kind of objects in a cluster.
type ResourceConfig struct {
	// Name is that of the source and sink.
	Name string `yaml:"-"`
	// APIVersion and Kind are as in a manifest: apps/v1 and Deployment.
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	// Resource is the plural that RBAC calls the kind by. It is looked up in the cluster; 'engine rbac' needs it for kinds
	// that are not built in.
	Resource string `yaml:"resource"`
	// Namespaces are those that are watched and written. Default: all.
	Namespaces []string `yaml:"namespaces"`
	// LabelSelector and FieldSelector bound what is watched, as kubectl's -l and --field-selector do.
	LabelSelector string `yaml:"labelSelector"`
	FieldSelector string `yaml:"fieldSelector"`
	// Cache is what is kept in memory: metadata (the default: objects are read from the server), full, or fields.
	Cache string `yaml:"cache"`
	// Fields are paths such as spec.replicas: their values travel with events, for mappers, and are all that is kept of an object
	// with cache: fields.
	Fields []string `yaml:"fields"`
	// IndexLabels are labels by which ByLabel finds objects.
	IndexLabels []string `yaml:"-"`
	// IgnoreStatus tells no changes of nothing but the status: for kinds whose generation counts the changes of their spec.
	IgnoreStatus bool `yaml:"ignoreStatus"`
	WriteConfig  `yaml:",inline"`
}

// Validate returns everything that is wrong with the configuration.
func (c ResourceConfig) Validate() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Kind == "" {
		add("kind: it is required, such as Deployment")
	}
	if gv, err := schema.ParseGroupVersion(c.APIVersion); c.APIVersion == "" {
		add("apiVersion: it is required, such as apps/v1")
	} else if err != nil || gv.Version == "" {
		add("apiVersion: %q is not of the form group/version, or v1", c.APIVersion)
	}
	if _, err := labels.Parse(c.LabelSelector); err != nil {
		add("labelSelector: %w", err)
	}
	if _, err := fields.ParseSelector(c.FieldSelector); err != nil {
		add("fieldSelector: %w", err)
	}
	if known := []string{CacheMetadata, CacheFields, CacheFull}; c.Cache != "" && !slices.Contains(known, c.Cache) {
		add("cache: %q is none of metadata, fields, full%s", c.Cache, nearest.Hint(c.Cache, known))
	}
	if c.Cache == CacheFields && len(c.Fields) == 0 {
		add("fields: cache: fields keeps what is listed here, and nothing is")
	}
	for _, f := range c.Fields {
		if f == "" || slices.Contains(strings.Split(f, "."), "") {
			add("fields: %q is not a path such as spec.replicas", f)
		}
	}
	return errors.Join(append(errs, c.validate())...)
}

// Resource is a kind of objects in a cluster as a source, a reader and a sink. Its methods are safe for concurrent use. Create
// it with NewResource.
type Resource struct {
	conn   *Connection
	cfg    ResourceConfig
	gvk    schema.GroupVersionKind
	kind   engine.Kind
	index  index
	labels sharedLabels
	// informer is where a source of FromInformer gets its objects from; others list and watch themselves.
	informer *informed
	fields   [][]string

	selector labels.Selector

	mu      sync.Mutex
	mapping *meta.RESTMapping // once it is known, and the client for it
	client  client
	status  error
}

var (
	_ engine.Source           = (*Resource)(nil)
	_ engine.Reader           = (*Resource)(nil)
	_ engine.Sink             = (*Resource)(nil)
	_ engine.RevisionComparer = (*Resource)(nil)
)

// Open returns a resource. Whether the cluster knows the kind is found out when it is run, read or written.
func Open(conn *Connection, cfg ResourceConfig) (*Resource, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	gvk := schema.FromAPIVersionAndKind(cfg.APIVersion, cfg.Kind)
	if cfg.Name == "" {
		cfg.Name = strings.ToLower(cfg.Kind)
	}
	if cfg.FieldManager == "" {
		cfg.FieldManager = "windlass"
	}
	r := &Resource{conn: conn, cfg: cfg, gvk: gvk, kind: KindOf(gvk.Group, gvk.Kind)}
	for _, f := range cfg.Fields {
		r.fields = append(r.fields, strings.Split(f, "."))
	}
	r.selector, _ = labels.Parse(cfg.LabelSelector) // it was validated
	r.index.init()
	r.index.indexed = cfg.IndexLabels
	r.labels.seed = maphash.MakeSeed()
	return r, nil
}

// Name implements engine.Source and engine.Sink.
func (r *Resource) Name() string { return r.cfg.Name }

// Key returns the key of the object called namespace/name, or name: in the only configured namespace, or in none.
func (r *Resource) Key(name string) engine.Key {
	k := engine.Key{Kind: r.kind, Scope: r.conn.scope, Name: name}
	if namespace, rest, ok := strings.Cut(name, "/"); ok {
		k.Namespace, k.Name = namespace, rest
	} else if len(r.cfg.Namespaces) == 1 {
		k.Namespace = r.cfg.Namespaces[0]
	}
	return k
}

// Covers implements engine.Reader and engine.Sink.
func (r *Resource) Covers(key engine.Key) bool {
	return key.Kind == r.kind && key.Scope == r.conn.scope && (len(r.cfg.Namespaces) == 0 || slices.Contains(r.cfg.Namespaces, key.Namespace))
}

// Cached says that every replica of an engine follows the source itself, to fill its cache.
func (r *Resource) Cached() bool { return r.keepsObjects() }

func (r *Resource) keepsObjects() bool { return r.cfg.Cache == CacheFull || r.cfg.Cache == CacheFields }

// KeepsOwner says that objects name their owners.
func (r *Resource) KeepsOwner() bool { return true }

// Status is why the source does not work at present, nil if it does.
func (r *Resource) Status() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

func (r *Resource) setStatus(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = err
}

// CompareRevisions implements engine.RevisionComparer.
func (r *Resource) CompareRevisions(a, b string) (int, error) {
	return resourceversion.CompareResourceVersion(a, b)
}

// resolve returns how the kind is called in the cluster, and a client for it.
func (r *Resource) resolve() (*meta.RESTMapping, client, error) {
	if r.informer != nil {
		return nil, nil, fmt.Errorf("source %s is an informer: only what that holds can be read, once it has synced, and nothing can be written", r.cfg.Name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mapping == nil {
		m, err := r.conn.mapping(r.gvk)
		if err != nil {
			return nil, nil, err
		}
		if r.client, err = r.conn.client(m); err != nil {
			return nil, nil, err
		}
		r.mapping = m
	}
	return r.mapping, r.client, nil
}

// forget asks for the mapping again the next time: the kind may have been removed.
func (r *Resource) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mapping = nil
	r.conn.mapper.Reset()
}

// at returns the client for the objects in a namespace.
func (r *Resource) at(namespace string) (client, error) {
	m, c, err := r.resolve()
	if err != nil {
		return nil, err
	}
	if (m.Scope.Name() == meta.RESTScopeNameNamespace) != (namespace != "") {
		if namespace == "" {
			return nil, fmt.Errorf("%w: a %s is in a namespace: name it namespace/name, or list one namespace under namespaces", engine.ErrInvalid, r.gvk.Kind)
		}
		return nil, fmt.Errorf("%w: a %s is in no namespace, and namespace %q was named", engine.ErrInvalid, r.gvk.Kind, namespace)
	}
	return c.in(namespace), nil
}

// Get implements engine.Reader. With cache full or fields, and once the first list has ended, it reads from memory.
func (r *Resource) Get(ctx context.Context, key engine.Key) (engine.Object, error) {
	if r.keepsObjects() && r.index.isSynced() {
		if e, ok := r.index.get(nameOf(key)); ok {
			return r.objectOf(e, key), nil
		}
		return engine.Object{}, engine.ErrNotFound
	}
	c, err := r.at(key.Namespace)
	if err != nil {
		return engine.Object{}, err
	}
	o, err := c.get(ctx, key.Name)
	if err != nil {
		return engine.Object{}, explained(err)
	}
	return r.objectOf(r.entryOf(o, true), key), nil
}

// List implements engine.Reader.
func (r *Resource) List(ctx context.Context) ([]engine.Object, error) {
	if r.keepsObjects() && r.index.isSynced() {
		return r.index.objects(func(n name, e *entry) engine.Object { return r.objectOf(e, r.keyOf(n)) }), nil
	}
	var objects []engine.Object
	for _, namespace := range r.namespaces() {
		err := r.each(ctx, namespace, r.cfg.LabelSelector, true, func(o runtime.Object) {
			objects = append(objects, r.objectOf(r.entryOf(o, true), r.keyOf(nameIn(o))))
		})
		if err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// watches says whether the watch tells of an object.
func (r *Resource) watches(o metav1.Object) bool {
	return r.cfg.FieldSelector == "" && r.selector.Matches(labels.Set(o.GetLabels()))
}

// Owned returns the keys of the objects that owner owns.
func (r *Resource) Owned(ctx context.Context, owner engine.Key) ([]engine.Key, error) {
	if r.index.isSynced() {
		return r.index.ownedBy(owner, r.keyOf), nil
	}
	var keys []engine.Key
	for _, namespace := range r.namespaces() {
		err := r.each(ctx, namespace, OwnerLabel+"="+hashOf(owner), false, func(o runtime.Object) {
			if e := r.entryOf(o, false); e.meta.Owner == owner {
				keys = append(keys, r.keyOf(nameIn(o)))
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return keys, nil
}

// ByLabel returns the objects with this value of a label, in no order. The label must be one of IndexLabels, and the first list must
// have ended. Without a cache of objects, they have no Value.
func (r *Resource) ByLabel(label, value string) ([]engine.Object, error) {
	if !slices.Contains(r.cfg.IndexLabels, label) {
		return nil, fmt.Errorf("label %q of source %s is not indexed; IndexLabels are %v", label, r.cfg.Name, r.cfg.IndexLabels)
	}
	return r.lookUp(lookup{"label", label, value})
}

// ByField is ByLabel for a field, which must be one of Fields.
func (r *Resource) ByField(field, value string) ([]engine.Object, error) {
	if !slices.Contains(r.cfg.Fields, field) {
		return nil, fmt.Errorf("field %q of source %s is not indexed; Fields are %v", field, r.cfg.Name, r.cfg.Fields)
	}
	return r.lookUp(lookup{"field", field, value})
}

func (r *Resource) lookUp(l lookup) ([]engine.Object, error) {
	if !r.index.isSynced() {
		return nil, fmt.Errorf("source %s: its first list has not ended", r.cfg.Name)
	}
	return r.index.found(l, func(n name, e *entry) engine.Object { return r.objectOf(e, r.keyOf(n)) }), nil
}

// each lists in pages from the server.
func (r *Resource) each(ctx context.Context, namespace, selector string, full bool, f func(o runtime.Object)) error {
	m, c, err := r.resolve()
	if err != nil {
		return err
	}
	if !full {
		c = r.conn.metadataClient(m)
	}
	c = c.in(namespace)
	opts := metav1.ListOptions{LabelSelector: selector, FieldSelector: r.cfg.FieldSelector, Limit: 500}
	for {
		list, err := c.list(ctx, opts)
		if err != nil {
			return explained(err)
		}
		if err := meta.EachListItem(list, func(o runtime.Object) error { f(o); return nil }); err != nil {
			return err
		}
		l, err := meta.ListAccessor(list)
		if err != nil {
			return err
		}
		if opts.Continue = l.GetContinue(); opts.Continue == "" {
			return nil
		}
	}
}

func (r *Resource) namespaces() []string {
	if len(r.cfg.Namespaces) == 0 {
		return []string{metav1.NamespaceAll}
	}
	return r.cfg.Namespaces
}

func (r *Resource) keyOf(n name) engine.Key {
	return engine.Key{Kind: r.kind, Scope: r.conn.scope, Namespace: n.namespace, Name: n.name}
}

// Get reads an object as a T: one of client-go's types, or a type of one's own with JSON tags.
func Get[T any](ctx context.Context, reader engine.Reader, key engine.Key) (T, error) {
	o, err := reader.Get(ctx, key)
	if err != nil {
		var none T
		return none, fmt.Errorf("get %s: %w", key, err)
	}
	return engine.As[T](o)
}

// entryOf makes what is kept of an object. Whole says to keep all of it that is configured, or for a resource that keeps
// metadata, all there is.
func (r *Resource) entryOf(o runtime.Object, whole bool) *entry {
	m, err := meta.Accessor(o)
	if err != nil {
		panic(fmt.Sprintf("%T has no metadata: %v", o, err)) // all that a cluster serves has
	}
	labels := m.GetLabels()
	if r.informer == nil { // the objects of an informer are not ours to change
		m.SetManagedFields(nil)
		labels = r.labels.of(labels)
		m.SetLabels(labels)
	}
	e := &entry{revision: m.GetResourceVersion(), incarnation: string(m.GetUID()), meta: r.metaOf(m)}
	e.meta.Labels = labels
	if r.cfg.IgnoreStatus {
		e.stamp = r.stampOf(m)
	}
	var tree map[string]any
	if _, partial := o.(*metav1.PartialObjectMetadata); partial {
		return e
	}
	if len(r.fields) > 0 {
		tree = treeOf(o)
		e.meta.Fields = make(map[string]string, len(r.fields))
		for _, path := range r.fields {
			if v, ok, err := unstructured.NestedFieldNoCopy(tree, path...); ok && err == nil {
				e.meta.Fields[strings.Join(path, ".")] = textOf(v)
			}
		}
	}
	switch {
	case !whole:
	case r.cfg.Cache == CacheFields:
		e.object = r.trimmed(tree, m)
	default:
		e.object = o
	}
	return e
}

// objectOf returns a copy, which the caller may change.
func (r *Resource) objectOf(e *entry, key engine.Key) engine.Object {
	o := engine.Object{Key: key, Incarnation: e.incarnation, Revision: e.revision, Meta: *e.meta}
	o.Labels, o.Annotations, o.Fields = maps.Clone(o.Labels), maps.Clone(o.Annotations), maps.Clone(o.Fields)
	if e.object != nil {
		value := e.object.DeepCopyObject()
		value.GetObjectKind().SetGroupVersionKind(r.gvk) // protobuf leaves it out
		o.Value = value
	}
	return o
}

// stampOf tells apart what differs in more than status. It is never 0.
func (r *Resource) stampOf(m metav1.Object) uint64 {
	var h maphash.Hash
	h.SetSeed(r.labels.seed)
	_, _ = h.Write(mustJSON([]any{m.GetUID(), m.GetGeneration(), m.GetLabels(), m.GetAnnotations(), m.GetFinalizers(), m.GetOwnerReferences(), m.GetDeletionTimestamp()}))
	return h.Sum64() | 1
}

// trimmed is an object of which only metadata and the declared fields are left.
func (r *Resource) trimmed(tree map[string]any, m metav1.Object) *unstructured.Unstructured {
	kept := map[string]any{}
	for _, path := range r.fields {
		if v, ok, err := unstructured.NestedFieldCopy(tree, path...); ok && err == nil {
			_ = unstructured.SetNestedField(kept, v, path...) // it fails if a field is declared inside of another that is
		}
	}
	u := &unstructured.Unstructured{Object: kept}
	u.SetGroupVersionKind(r.gvk)
	u.SetNamespace(m.GetNamespace())
	u.SetName(m.GetName())
	return u
}

// treeOf is an object as JSON has it.
func treeOf(o runtime.Object) map[string]any {
	if u, ok := o.(*unstructured.Unstructured); ok {
		return u.Object
	}
	tree, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		panic(fmt.Sprintf("a %T cannot be converted: %v", o, err)) // a type without JSON tags
	}
	return tree
}

func textOf(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	switch reflect.ValueOf(v).Kind() {
	case reflect.Map, reflect.Slice:
		return string(mustJSON(v))
	default:
		return fmt.Sprint(v)
	}
}
