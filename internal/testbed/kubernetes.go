package testbed

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

var (
	apiServer = server{
		folder: "kube-apiserver", program: "k8s.io/kubernetes/cmd/kube-apiserver", version: "v1.36.3",
		ldflags: "-X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36",
	}
	etcd = server{folder: "etcd", program: "go.etcd.io/etcd/server/v3", version: "v3.6.8"}
)

// Kubernetes is an API server with its etcd. RBAC is on; there is no controller manager and no kubelet: nothing collects
// garbage and no pod runs.
type Kubernetes struct {
	// Kubeconfig is the path of a file for the administrator.
	Kubeconfig string
	// Address is where the API server listens, and CAFile what signed its certificate.
	Address, CAFile string

	dir, token, etcdURL string
	etcdPath, apiPath   string
	etcd, api           *process
	client              *http.Client
}

// StartKubernetes starts an API server. It keeps everything in dir, the logs too.
func StartKubernetes(ctx context.Context, dir string, log io.Writer) (k *Kubernetes, err error) {
	k = &Kubernetes{dir: dir, token: rand.Text()}
	if k.etcdPath, err = etcd.binary(ctx, log); err != nil {
		return nil, err
	}
	if k.apiPath, err = apiServer.binary(ctx, log); err != nil {
		return nil, err
	}
	if err := k.writeKeys(); err != nil {
		return nil, err
	}
	addresses, err := FreeAddresses(ctx, 3)
	if err != nil {
		return nil, err
	}
	k.etcdURL, k.Address = "http://"+addresses[0], addresses[2]
	k.etcd, err = start(k.path("etcd.log"), k.etcdPath, "--data-dir", k.path("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", k.etcdURL, "--advertise-client-urls", k.etcdURL, "--listen-peer-urls", "http://"+addresses[1])
	if err != nil {
		return nil, err
	}
	if err := k.StartAPI(ctx); err != nil {
		k.Stop()
		return nil, err
	}
	return k, nil
}

func (k *Kubernetes) path(name string) string { return filepath.Join(k.dir, name) }

// writeKeys makes the key of service accounts and the administrator's token.
func (k *Kubernetes) writeKeys() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"sa.key":     pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		"sa.pub":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"tokens.csv": []byte(k.token + ",admin,1,\"system:masters\"\n"),
	} {
		if err := os.WriteFile(k.path(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// StartAPI starts the API server, at the same address each time, and returns once it is ready.
func (k *Kubernetes) StartAPI(ctx context.Context) error {
	_, port, err := net.SplitHostPort(k.Address)
	if err != nil {
		return err
	}
	k.CAFile = k.path("pki/apiserver.crt")
	k.api, err = start(k.path("kube-apiserver.log"), k.apiPath, "--etcd-servers", k.etcdURL, "--secure-port", port, "--bind-address", "127.0.0.1",
		"--cert-dir", k.path("pki"), "--service-account-key-file", k.path("sa.pub"), "--service-account-signing-key-file", k.path("sa.key"),
		"--service-account-issuer", "https://kubernetes.default.svc", "--token-auth-file", k.path("tokens.csv"), "--authorization-mode", "RBAC",
		"--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount", "--watch-cache=true")
	if err != nil {
		return err
	}
	err = await(ctx, "kube-apiserver", k.path("kube-apiserver.log"), k.api, func() bool {
		_, err := k.ask(ctx, http.MethodGet, "https://"+k.Address+"/readyz", nil)
		return err == nil
	})
	if err != nil {
		return err
	}
	return k.writeKubeconfig()
}

func (k *Kubernetes) writeKubeconfig() error {
	ca, err := os.ReadFile(k.CAFile)
	if err != nil {
		return err
	}
	k.Kubeconfig = k.path("kubeconfig")
	return os.WriteFile(k.Kubeconfig, []byte(Kubeconfig("https://"+k.Address, ca, k.token)), 0o600)
}

// Kubeconfig is a file for a server, its authority in PEM and a token.
func Kubeconfig(server string, ca []byte, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [ { name: test, cluster: { server: %q, certificate-authority-data: %q } } ]
users: [ { name: test, user: { token: %q } } ]
contexts: [ { name: test, context: { cluster: test, user: test } } ]
current-context: test
`, server, base64.StdEncoding.EncodeToString(ca), token)
}

// ask sends a request as the administrator.
func (k *Kubernetes) ask(ctx context.Context, method, url string, body any) ([]byte, error) {
	if k.client == nil {
		k.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}} //nolint:gosec // our own server.
	}
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+k.token)
	res, err := k.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: %s: %s", method, url, res.Status, strings.TrimSpace(string(answer)))
	}
	return answer, err
}

// KillAPI ends the API server at once, as a crash does.
func (k *Kubernetes) KillAPI() { k.api.kill() }

// Compact forgets the history in etcd, so that a watch that is behind must list again.
func (k *Kubernetes) Compact(ctx context.Context) error {
	answer, err := k.ask(ctx, http.MethodPost, k.etcdURL+"/v3/kv/range", map[string]any{"key": "AA=="})
	if err != nil {
		return err
	}
	var head struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	if err := json.Unmarshal(answer, &head); err != nil {
		return err
	}
	_, err = k.ask(ctx, http.MethodPost, k.etcdURL+"/v3/kv/compaction", map[string]any{"revision": head.Header.Revision, "physical": true})
	return err
}

// Stop ends the servers.
func (k *Kubernetes) Stop() {
	for _, p := range []*process{k.api, k.etcd} {
		if p != nil {
			p.kill()
		}
	}
}
