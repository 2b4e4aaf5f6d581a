package testbed

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

var consul = server{folder: "consul", program: "github.com/hashicorp/consul", version: "v1.22.0"}

// Consul is a cluster of Consul servers.
type Consul struct {
	// Addresses are where the servers' HTTP APIs listen.
	Addresses []string
	// Token may do anything, if ACLs are on.
	Token string
	// Secure is the first server's address for TLS, and Socket its socket's path.
	Secure, Socket string

	dir     string
	path    string
	configs []string
	servers []*process
}

// ConsulConfig says what is started.
type ConsulConfig struct {
	// Servers is how many; 0 is one.
	Servers int
	// ACL denies everything to who has no token.
	ACL bool
	// CertFile and KeyFile make a server listen by TLS, at Secure, and on a socket besides.
	CertFile, KeyFile string
	// Rate is how many reads, and how many writes, a server takes a second; 0 is no limit.
	Rate int
}

// StartConsul starts servers, and returns once they have a leader. It keeps everything in dir, the logs too.
func StartConsul(ctx context.Context, cfg ConsulConfig, dir string, log io.Writer) (c *Consul, err error) {
	n := max(cfg.Servers, 1)
	c = &Consul{dir: dir, Token: rand.Text(), servers: make([]*process, n)}
	if c.path, err = consul.binary(ctx, log); err != nil {
		return nil, err
	}
	all, err := FreeAddresses(ctx, 3*n+1)
	if err != nil {
		return nil, err
	}
	var join []string
	for i := range n {
		join = append(join, fmt.Sprintf("%q", all[3*i+1]))
	}
	for i := range n {
		port := func(k int) string { _, p, _ := net.SplitHostPort(all[3*i+k]); return p }
		c.Addresses = append(c.Addresses, all[3*i])
		acl := ""
		if cfg.ACL {
			acl = fmt.Sprintf(`acl { enabled = true, default_policy = "deny", tokens { initial_management = %q } }`, uuid(c.Token))
		}
		rate := ""
		if cfg.Rate > 0 {
			rate = fmt.Sprintf(`, request_limits { mode = "enforcing", read_rate = %d, write_rate = %d }`, cfg.Rate, cfg.Rate)
		}
		tls, https := "", "-1"
		if cfg.CertFile != "" {
			c.Secure, c.Socket = all[3*n], filepath.Join(dir, "s")
			_, https, _ = net.SplitHostPort(c.Secure)
			tls = fmt.Sprintf(`tls { https { cert_file = %q, key_file = %q } }
addresses { http = "127.0.0.1 unix://%s" }`, cfg.CertFile, cfg.KeyFile, c.Socket)
		}
		config := fmt.Sprintf(`
node_name = "server%d"
server = true
bootstrap_expect = %d
data_dir = %q
bind_addr = "127.0.0.1"
ports { http = %s, https = %s, serf_lan = %s, server = %s, serf_wan = -1, dns = -1, grpc = -1, grpc_tls = -1 }
retry_join = [%s]
retry_interval = "1s"
performance { raft_multiplier = 1 }
connect { enabled = false }
limits { http_max_conns_per_client = 200%s }
disable_update_check = true
%s
%s
`, i, n, filepath.Join(dir, fmt.Sprint("data", i)), port(0), https, port(1), port(2), strings.Join(join, ", "), rate, acl, tls)
		c.configs = append(c.configs, filepath.Join(dir, fmt.Sprintf("server%d.hcl", i)))
		if err := os.WriteFile(c.configs[i], []byte(config), 0o600); err != nil {
			return nil, err
		}
	}
	if cfg.ACL {
		c.Token = uuid(c.Token)
	} else {
		c.Token = ""
	}
	for i := range n {
		if err := c.launch(i); err != nil {
			c.Stop()
			return nil, err
		}
	}
	for i := range n {
		if err := c.ready(ctx, i); err != nil {
			c.Stop()
			return nil, err
		}
	}
	return c, nil
}

// uuid makes a token of Consul's form from a text.
func uuid(text string) string {
	h := fmt.Sprintf("%x", text+strings.Repeat("0", 16))
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:32]
}

func (c *Consul) log(i int) string { return filepath.Join(c.dir, fmt.Sprintf("consul%d.log", i)) }

func (c *Consul) launch(i int) (err error) {
	c.servers[i], err = start(c.log(i), c.path, "agent", "-config-file", c.configs[i], "-log-level", "warn")
	return err
}

// Start starts a server again, and returns once it knows of a leader.
func (c *Consul) Start(ctx context.Context, i int) error {
	if err := c.launch(i); err != nil {
		return err
	}
	return c.ready(ctx, i)
}

func (c *Consul) ready(ctx context.Context, i int) error {
	return await(ctx, "consul", c.log(i), c.servers[i], func() bool {
		leader, err := c.Leader(ctx, i)
		if err != nil || leader == "" {
			return false
		}
		// A leader takes writes only when it has caught up.
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://"+c.Addresses[i]+"/v1/kv/testbed", strings.NewReader("1"))
		if err != nil {
			return false
		}
		req.Header.Set("X-Consul-Token", c.Token)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		_ = res.Body.Close()
		return res.StatusCode == http.StatusOK
	})
}

// Leader is the raft address of the leader, as a server knows it.
func (c *Consul) Leader(ctx context.Context, i int) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.Addresses[i]+"/v1/status/leader", nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("X-Consul-Token", c.Token)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return strings.Trim(strings.TrimSpace(string(b)), `"`), err
}

// Kill ends a server at once, as a crash does.
func (c *Consul) Kill(i int) { c.servers[i].kill() }

// LeaderIndex is the number of the leader, -1 if the server i knows of none.
func (c *Consul) LeaderIndex(ctx context.Context, i int) int {
	leader, err := c.Leader(ctx, i)
	if err != nil || leader == "" {
		return -1
	}
	for n, config := range c.configs {
		text, err := os.ReadFile(config)
		if _, port, _ := net.SplitHostPort(leader); err == nil && strings.Contains(string(text), "server = "+port+",") {
			return n
		}
	}
	return -1
}

// Stop ends the servers.
func (c *Consul) Stop() {
	for _, p := range c.servers {
		if p != nil {
			p.kill()
		}
	}
}
