package k8s

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// client reads objects of one kind, in one namespace or in all.
type client interface {
	in(namespace string) client
	get(ctx context.Context, name string) (runtime.Object, error)
	list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error)
	watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error)
}

// client returns the one that decodes into client-go's types, from protobuf, if there is one of that kind.
func (c *Connection) client(m *meta.RESTMapping) (client, error) {
	gvk := m.GroupVersionKind
	if !scheme.Scheme.Recognizes(gvk) || !scheme.Scheme.Recognizes(listKind(gvk)) {
		of := c.dynamic.Resource(m.Resource)
		return untyped{of, of}, nil
	}
	config := rest.CopyConfig(c.config)
	gv := gvk.GroupVersion()
	config.GroupVersion, config.APIPath = &gv, dynamic.LegacyAPIPathResolverFunc(gvk)
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	r, err := rest.RESTClientForConfigAndClient(config, c.http)
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", gvk, err)
	}
	return typed{r, m, metav1.NamespaceAll}, nil
}

func listKind(gvk schema.GroupVersionKind) schema.GroupVersionKind {
	gvk.Kind += "List"
	return gvk
}

type typed struct {
	rest      *rest.RESTClient
	m         *meta.RESTMapping
	namespace string
}

func (c typed) in(namespace string) client {
	c.namespace = namespace
	return c
}

func (c typed) request() *rest.Request {
	return c.rest.Get().NamespaceIfScoped(c.namespace, c.namespace != "").Resource(c.m.Resource.Resource)
}

func (c typed) get(ctx context.Context, name string) (runtime.Object, error) {
	o, err := scheme.Scheme.New(c.m.GroupVersionKind)
	if err != nil {
		return nil, err
	}
	return o, c.request().Name(name).Do(ctx).Into(o)
}

func (c typed) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	o, err := scheme.Scheme.New(listKind(c.m.GroupVersionKind))
	if err != nil {
		return nil, err
	}
	return o, c.request().VersionedParams(&opts, scheme.ParameterCodec).Do(ctx).Into(o)
}

func (c typed) watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	opts.Watch = true
	return c.request().VersionedParams(&opts, scheme.ParameterCodec).Watch(ctx)
}

type untyped struct {
	dynamic.ResourceInterface

	of dynamic.NamespaceableResourceInterface
}

func (c untyped) in(namespace string) client { return untyped{c.of.Namespace(namespace), c.of} }

func (c untyped) get(ctx context.Context, name string) (runtime.Object, error) {
	return result(c.Get(ctx, name, metav1.GetOptions{}))
}

func (c untyped) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	return result(c.List(ctx, opts))
}

func (c untyped) watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	return c.Watch(ctx, opts)
}

// result keeps a nil pointer from becoming an object.
func result[T interface {
	*unstructured.Unstructured | *unstructured.UnstructuredList | *metav1.PartialObjectMetadata | *metav1.PartialObjectMetadataList
	runtime.Object
}](o T, err error) (runtime.Object, error) {
	if err != nil {
		return nil, err
	}
	return o, nil
}

func (c *Connection) metadataClient(m *meta.RESTMapping) client {
	of := c.metadata.Resource(m.Resource)
	return metadataOnly{of, of}
}

type metadataOnly struct {
	metadata.ResourceInterface

	of metadata.Getter
}

func (c metadataOnly) in(namespace string) client {
	return metadataOnly{c.of.Namespace(namespace), c.of}
}

func (c metadataOnly) get(ctx context.Context, name string) (runtime.Object, error) {
	return result(c.Get(ctx, name, metav1.GetOptions{}))
}

func (c metadataOnly) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	return result(c.List(ctx, opts))
}

func (c metadataOnly) watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	return c.Watch(ctx, opts)
}

// newTyped returns an empty object of client-go's type of a kind, nil if it has none.
func newTyped(gvk schema.GroupVersionKind) (runtime.Object, error) {
	if !scheme.Scheme.Recognizes(gvk) || !scheme.Scheme.Recognizes(listKind(gvk)) {
		return nil, nil //nolint:nilnil // no type is an answer too.
	}
	return scheme.Scheme.New(gvk)
}
