package k8s

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/windlass-dev/windlass/engine"
	"github.com/windlass-dev/windlass/internal/nearest"
)

// ConnectionConfig says how to reach a cluster.
type ConnectionConfig struct {
	// Kubeconfig is the path of a kubeconfig. Default: the cluster that this process runs in, else $KUBECONFIG, else
	// ~/.kube/config.
	Kubeconfig string `yaml:"kubeconfig"`
	// Context is one of the kubeconfig's. Default: its current one.
	Context string `yaml:"context"`
	// QPS and Burst bound the requests of this connection a second. Defaults 50 and 100; -1 is no bound.
	QPS   float64 `yaml:"qps"`
	Burst int     `yaml:"burst"`
	// Scope is the name of the connection.
	Scope string `yaml:"-"`
	// UserAgent is what the server's audit log shows. Default "windlass".
	UserAgent string `yaml:"-"`
	// Logger is told what goes wrong. Nil is nowhere.
	Logger *slog.Logger `yaml:"-"`
}

// Validate returns everything that is wrong with the configuration; files are looked at when connecting.
func (c ConnectionConfig) Validate() error {
	var errs []error
	if c.QPS < 0 && c.QPS != -1 {
		errs = append(errs, fmt.Errorf("qps: %v is less than nothing; -1 is no bound", c.QPS))
	}
	if c.Burst < 0 {
		errs = append(errs, fmt.Errorf("burst: %d is less than nothing", c.Burst))
	}
	return errors.Join(errs...)
}

// Connection is a connection to one cluster. Its methods are safe for concurrent use.
type Connection struct {
	scope    string
	log      *slog.Logger
	config   *rest.Config
	http     *http.Client
	dynamic  dynamic.Interface
	metadata metadata.Interface
	mapper   *restmapper.DeferredDiscoveryRESTMapper
	discover discovery.CachedDiscoveryInterface

	recording   sync.Mutex
	broadcaster record.EventBroadcaster // once something is recorded
	recorders   map[string]record.EventRecorder
}

// Connect loads the credentials and asks the server for its version. Its errors say what is wrong with which file or server.
func Connect(ctx context.Context, cfg ConnectionConfig) (*Connection, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("connect to Kubernetes: %w", err)
	}
	config, err := cfg.load()
	if err != nil {
		return nil, fmt.Errorf("connect to Kubernetes: %w", err)
	}
	return connect(ctx, cfg, config)
}

// ConnectConfig is Connect with credentials that the program has.
func ConnectConfig(ctx context.Context, config *rest.Config, cfg ConnectionConfig) (*Connection, error) {
	return connect(ctx, cfg, rest.CopyConfig(config))
}

func (c ConnectionConfig) load() (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.Kubeconfig
	if c.Kubeconfig == "" && c.Context == "" {
		config, err := rest.InClusterConfig()
		if err == nil || !errors.Is(err, rest.ErrNotInCluster) {
			return config, err
		}
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: c.Context}).ClientConfig()
	switch {
	case err == nil:
		return config, nil
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("no kubeconfig was found at %s, and this process does not run in a cluster: set kubeconfig or $KUBECONFIG",
			cmp.Or(c.Kubeconfig, strings.Join(rules.Precedence, " or ")))
	case c.Context != "" && strings.Contains(err.Error(), fmt.Sprintf("context %q does not exist", c.Context)): // it has no type
		hint := ""
		if loaded, err := rules.Load(); err == nil {
			names := make([]string, 0, len(loaded.Contexts))
			for name := range loaded.Contexts {
				names = append(names, name)
			}
			hint = nearest.Hint(c.Context, names)
		}
		return nil, fmt.Errorf("context: the kubeconfig has no context %q%s", c.Context, hint)
	default:
		return nil, fmt.Errorf("kubeconfig %s: %w", cmp.Or(c.Kubeconfig, rules.GetDefaultFilename()), err)
	}
}

func connect(ctx context.Context, cfg ConnectionConfig, config *rest.Config) (*Connection, error) {
	c := &Connection{scope: cfg.Scope, log: cfg.Logger, config: config}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	config.RateLimiter = newLimiter(cmp.Or(cfg.QPS, 50), cmp.Or(cfg.Burst, 100))
	config.UserAgent = cmp.Or(cfg.UserAgent, "windlass")
	config.WarningHandlerWithContext = warnings{c.log}
	var err error
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return nil, fmt.Errorf("connect to Kubernetes at %s: %w", config.Host, err)
	}
	found, err := discovery.NewDiscoveryClientForConfigAndClient(config, c.http)
	if err != nil {
		return nil, fmt.Errorf("connect to Kubernetes at %s: %w", config.Host, err)
	}
	c.discover = memory.NewMemCacheClient(found)
	c.mapper = restmapper.NewDeferredDiscoveryRESTMapper(c.discover)
	if c.dynamic, err = dynamic.NewForConfigAndClient(config, c.http); err != nil {
		return nil, fmt.Errorf("connect to Kubernetes at %s: %w", config.Host, err)
	}
	if c.metadata, err = metadata.NewForConfigAndClient(metadata.ConfigFor(config), c.http); err != nil {
		return nil, fmt.Errorf("connect to Kubernetes at %s: %w", config.Host, err)
	}
	ask, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := found.RESTClient().Get().AbsPath("/version").Do(ask).Raw(); err != nil {
		return nil, fmt.Errorf("connect to Kubernetes at %s: %w", config.Host, explained(err))
	}
	return c, nil
}

// Close ends the connections that are idle, and the recording of Events.
func (c *Connection) Close() {
	c.recording.Lock()
	defer c.recording.Unlock()
	if c.broadcaster != nil {
		c.broadcaster.Shutdown()
	}
	c.http.CloseIdleConnections()
}

// LogTo sends the log of client-go, which is one for the process, to l.
func LogTo(l *slog.Logger) { klog.SetSlogLogger(l) }

// warnings logs what the server warns of.
type warnings struct{ log *slog.Logger }

func (w warnings) HandleWarningHeaderWithContext(ctx context.Context, code int, _, text string) {
	if code == 299 && text != "" {
		w.log.WarnContext(ctx, "the API server warns", "warning", text)
	}
}

// newLimiter returns what all clients of a connection share. Client-go measures how long requests wait for it.
func newLimiter(qps float64, burst int) flowcontrol.RateLimiter {
	if qps < 0 {
		return flowcontrol.NewFakeAlwaysRateLimiter()
	}
	return flowcontrol.NewTokenBucketRateLimiter(float32(qps), burst)
}

// KindOf is the engine's name for a kind: k8s/apps/Deployment, and k8s/core/Service for one without a group.
func KindOf(group, kind string) engine.Kind {
	return engine.KindOf("k8s/" + cmp.Or(group, "core") + "/" + kind)
}

// groupKind is the reverse of KindOf.
func groupKind(k engine.Kind) (schema.GroupKind, bool) {
	rest, ok := strings.CutPrefix(k.String(), "k8s/")
	if !ok {
		return schema.GroupKind{}, false
	}
	group, kind, ok := strings.Cut(rest, "/")
	if group == "core" {
		group = ""
	}
	return schema.GroupKind{Group: group, Kind: kind}, ok
}

// errKindUnknown says that the server has no such kind, at present.
var errKindUnknown = errors.New("the server has no such kind")

// mapping finds out how a kind is called in URLs and whether it has namespaces. It asks the server again if it does not know.
func (c *Connection) mapping(gvk schema.GroupVersionKind) (*meta.RESTMapping, error) {
	m, err := c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		c.mapper.Reset()
		m, err = c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	}
	if !meta.IsNoMatchError(err) {
		return m, explained(err)
	}
	return nil, fmt.Errorf("%w: %s of %s: install its definition, or correct apiVersion and kind%s",
		errKindUnknown, gvk.Kind, gvk.GroupVersion(), nearest.Hint(gvk.Kind, c.kinds(gvk)))
}

// kinds are the kinds that could have been meant: those of the group and version, or if there is no such, those of the same
// name elsewhere.
func (c *Connection) kinds(gvk schema.GroupVersionKind) (names []string) {
	_, lists, _ := c.discover.ServerGroupsAndResources() // a part is better than nothing
	for _, l := range lists {
		for _, r := range l.APIResources {
			if strings.Contains(r.Name, "/") {
				continue
			}
			switch {
			case l.GroupVersion == gvk.GroupVersion().String():
				names = append(names, r.Kind)
			case strings.EqualFold(r.Kind, gvk.Kind):
				names = append(names, r.Kind+" of "+l.GroupVersion)
			}
		}
	}
	return slices.Compact(names)
}

// ownerReference returns a reference to the object of key, nil if there is none or none can be made from an object in namespace.
func (c *Connection) ownerReference(ctx context.Context, key engine.Key, namespace string) (map[string]any, error) {
	gk, ok := groupKind(key.Kind)
	if !ok || key.Scope != c.scope || key.Namespace != "" && key.Namespace != namespace {
		return nil, nil
	}
	m, err := c.mapper.RESTMapping(gk)
	if err != nil {
		return nil, explained(err)
	}
	o, err := c.metadata.Resource(m.Resource).Namespace(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if err = explained(err); engine.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return map[string]any{
		"apiVersion": m.GroupVersionKind.GroupVersion().String(), "kind": gk.Kind, "name": key.Name, "uid": string(o.UID),
		"controller": true, "blockOwnerDeletion": true,
	}, nil
}
