//go:build e2e

package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/windlass-dev/windlass/internal/testbed"
)

// accountWith returns a kubeconfig for a new service account that is bound to a role.
func accountWith(t *testing.T, kube kubernetes.Interface, name string, rules []rbacv1.PolicyRule) (kubeconfig string) {
	t.Helper()
	about := metav1.ObjectMeta{Name: name}
	_, err := kube.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: about}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = kube.RbacV1().Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: about, Rules: rules}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = kube.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: about, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: name}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	token, err := kube.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	require.NoError(t, err)
	last := rules[len(rules)-1]
	eventually(t, "the server knows the role", func() bool {
		review, err := kube.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: "system:serviceaccount:default:" + name, Groups: []string{"system:serviceaccounts", "system:authenticated"},
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: last.Verbs[0], Resource: last.Resources[0]},
		}}, metav1.CreateOptions{})
		return err == nil && review.Status.Allowed
	})
	admin, err := clientcmd.BuildConfigFromFlags("", os.Getenv("WINDLASS_KUBECONFIG"))
	require.NoError(t, err)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, []byte(testbed.Kubeconfig(admin.Host, admin.CAData, token.Status.Token)), 0o600))
	return kubeconfig
}

// TestThePrintedRoleSufficesAndIsTheLeast runs an example with exactly the role that is printed for it, and with each verb of that
// role taken away.
func TestThePrintedRoleSufficesAndIsTheLeast(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), binary, "rbac", "-c", "../../examples/nats-to-configmaps/engine.yaml").Output()
	require.NoError(t, err)
	_, text, ok := bytes.Cut(out, []byte("---\n"))
	require.True(t, ok)
	var role rbacv1.Role
	require.NoError(t, yaml.UnmarshalStrict(text, &role))
	require.Equal(t, "default", role.Namespace)
	require.Len(t, role.Rules, 2)

	t.Run("all of it", func(t *testing.T) {
		p, finished := exercise(t, "rbac-all", role.Rules)
		eventually(t, "made and removed", finished)
		p.signal(syscall.SIGTERM)
		require.Equal(t, 0, p.wait())
		require.NotContains(t, p.output(), "cannot")
	})
	for i, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			if verb == "list" {
				continue // this server streams lists to who may watch; others do not
			}
			without := slices.Clone(role.Rules)
			without[i].Verbs = slices.DeleteFunc(slices.Clone(rule.Verbs), func(v string) bool { return v == verb })
			name := fmt.Sprintf("rbac-%s-%s", rule.Resources[0], verb)
			t.Run("without "+verb+" of "+rule.Resources[0], func(t *testing.T) {
				p, finished := exercise(t, name, without)
				denied := fmt.Sprintf(`cannot %s resource \"%s\"`, verb, rule.Resources[0])
				eventually(t, denied, func() bool { _ = finished(); return strings.Contains(p.output(), denied) })
				if verb != "watch" { // client-go's own log says no more
					require.Contains(t, p.output(), "a right is missing: grant it with a Role or ClusterRole")
				}
			})
		}
	}
}

// exercise runs an example as an account with these rules. Finished puts and deletes a key, and says whether its ConfigMap came
// and went.
func exercise(t *testing.T, name string, rules []rbacv1.PolicyRule) (p *process, finished func() bool) {
	t.Helper()
	dir, port, _, kube := clusterExample(t, "nats-to-configmaps")
	p = start(t, dir, []string{"KUBECONFIG=" + accountWith(t, kube, name, rules)}, binary, "run", "-c", "engine.yaml")
	apps := bucket(t, client(t, port), "apps")
	put(t, apps, name, `{"image":"a:1","settings":{}}`)
	came := false
	return p, func() bool {
		_, err := kube.CoreV1().ConfigMaps("default").Get(t.Context(), name, metav1.GetOptions{})
		if !came && err == nil {
			came = true
			require.NoError(t, apps.Delete(t.Context(), name))
		}
		return came && err != nil
	}
}

func TestRolesForAKindThatIsNotBuiltIn(t *testing.T) {
	dir, _, env, _ := clusterExample(t, "services-to-nats")
	rbac := func(resource string, env []string) *process {
		text := fmt.Sprintf(`
apiVersion: windlass.dev/v1alpha1
kind: Engine
connections: { cluster: { kubernetes: {} } }
sources: [ { name: services, kubernetes: { apiVersion: %s, kind: %s, resource: %q, cache: full } } ]
sinks: [ { name: out, nats: { bucket: out } } ]
controllers: [ { name: c, for: services, handler: { sync: { to: out, data: object.data } } } ]
`, "apiregistration.k8s.io/v1", "APIService", resource)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.yaml"), []byte(text), 0o600))
		return start(t, dir, env, binary, "rbac", "-c", "engine.yaml")
	}
	nowhere := []string{"KUBECONFIG=/nowhere"}
	p := rbac("", env) // the cluster is asked
	require.Equal(t, 0, p.wait())
	require.Contains(t, p.output(), "kind: ClusterRole")
	require.Contains(t, p.output(), "- apiservices\n")
	p = rbac("apiservices", nowhere)
	require.Equal(t, 0, p.wait())
	require.Contains(t, p.output(), "- apiservices\n  verbs:\n  - list\n  - watch\n")
	p = rbac("", nowhere)
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.output(), "services: resource: say the plural of APIService, or let the cluster be asked: connect to Kubernetes: no kubeconfig was found at /nowhere")
}
