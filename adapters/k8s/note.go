package k8s

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	clientv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/windlass-dev/windlass/engine"
)

// events returns what records Kubernetes Events. Client-go's recorder joins equal ones, and lets no object have more than one in five
// minutes after the first 25.
func (c *Connection) events(component string) (record.EventRecorder, error) {
	c.recording.Lock()
	defer c.recording.Unlock()
	if r, ok := c.recorders[component]; ok {
		return r, nil
	}
	client, err := clientv1.NewForConfigAndClient(c.config, c.http)
	if err != nil {
		return nil, err
	}
	if c.broadcaster == nil {
		c.broadcaster = record.NewBroadcaster()
		c.broadcaster.StartRecordingToSink(&clientv1.EventSinkImpl{Interface: client.Events("")})
	}
	r := c.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component})
	if c.recorders == nil {
		c.recorders = make(map[string]record.EventRecorder)
	}
	c.recorders[component] = r
	return r, nil
}

// Record implements engine.Recorder: a Kubernetes Event about the object, in its namespace. An informer's source has no connection to
// send one by.
func (r *Resource) Record(key engine.Key, n engine.Note) {
	if r.informer != nil {
		return
	}
	events, err := r.conn.events(r.cfg.FieldManager)
	if err != nil {
		r.conn.log.Warn("an Event cannot be recorded", "key", key.String(), "err", err)
		return
	}
	about := &corev1.ObjectReference{APIVersion: r.cfg.APIVersion, Kind: r.cfg.Kind, Namespace: key.Namespace, Name: key.Name}
	if e, ok := r.index.get(nameOf(key)); ok {
		about.UID, about.ResourceVersion = types.UID(e.incarnation), e.revision
	}
	kind := corev1.EventTypeNormal
	if n.Warning {
		kind = corev1.EventTypeWarning
	}
	events.Event(about, kind, n.Reason, n.Message)
}
