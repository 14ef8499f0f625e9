package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Options say what to start.
type Options struct {
	// Name names the cluster in certificates and in the kubeconfig.
	Name string
	// Dir holds the data. It exists, is absolute, and is the working directory of the process.
	Dir string
	// Port is the TCP port that the API server listens on; 0 picks a free one.
	Port int
	// Bind is the address that it listens on: 127.0.0.1 if it is nil, all of them if it is unspecified (0.0.0.0).
	Bind net.IP
	// Advertise is the address that clients are told to use. If it is nil it is Bind, or 127.0.0.1 if Bind says all.
	Advertise net.IP
	// Log receives the errors that etcd logs.
	Log io.Writer
}

// Plane is one running control plane.
type Plane struct {
	name     string
	certs    pki
	host     string
	config   *rest.Config
	client   kubernetes.Interface
	cancel   context.CancelFunc
	etcd     *embed.Etcd
	finished chan struct{}
	failure  error
}

// Start runs a control plane and returns once /readyz is ok and namespaces get their ServiceAccounts.
// It runs until Stop; cancelling ctx only ends the wait.
func Start(ctx context.Context, opts Options) (*Plane, error) {
	opts.chooseAddresses()
	certs, err := openPKI(opts)
	if err != nil {
		return nil, err
	}
	listener, err := listen(ctx, opts.Bind, opts.Port)
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort(opts.Advertise.String(), strconv.Itoa(port(listener)))
	p := &Plane{name: opts.Name, certs: certs, host: "https://" + address, finished: make(chan struct{})}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	if p.etcd, err = startEtcd(ctx, opts); err != nil {
		return nil, err
	}
	callDirectly(running, p.etcd.Server)
	if err := p.serve(running, listener, opts.Advertise); err != nil {
		return nil, err
	}
	if err := p.awaitReady(ctx); err != nil {
		return nil, err
	}
	if err := p.startControllers(running); err != nil {
		return nil, err
	}
	if err := p.awaitServiceAccounts(ctx); err != nil {
		return nil, err
	}
	return p, nil
}

// chooseAddresses fills in the addresses that are not said.
func (o *Options) chooseAddresses() {
	loopback := net.IPv4(127, 0, 0, 1)
	if o.Bind == nil {
		o.Bind = loopback
	}
	switch {
	case o.Advertise != nil:
	case o.Bind.IsUnspecified():
		o.Advertise = loopback
	default:
		o.Advertise = o.Bind
	}
}

// serve runs the API server until ctx ends; finished is closed and failure set when it has.
func (p *Plane) serve(ctx context.Context, listener net.Listener, advertise net.IP) error {
	server, err := newAPIServer(ctx, listener, advertise, p.certs)
	if err != nil {
		return err
	}
	prepared, err := server.PrepareRun()
	if err != nil {
		return fmt.Errorf("prepare API server: %w", err)
	}
	p.config = rest.CopyConfig(server.GenericAPIServer.LoopbackClientConfig)
	if p.client, err = kubernetes.NewForConfig(p.config); err != nil {
		return fmt.Errorf("build client: %w", err)
	}
	go func() {
		defer close(p.finished)
		p.failure = prepared.Run(ctx)
	}()
	return nil
}

func (p *Plane) startControllers(ctx context.Context) error {
	controllers, err := newControllers(ctx, p.config, p.certs)
	if err != nil {
		return err
	}
	if err := startScheduler(ctx, p.client); err != nil {
		return err
	}
	controllers.start(ctx)
	return nil
}

func (p *Plane) awaitReady(ctx context.Context) error {
	return p.await(ctx, "the API server", func(ctx context.Context) error {
		return p.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// awaitServiceAccounts waits for what every pod in the namespace default needs.
func (p *Plane) awaitServiceAccounts(ctx context.Context) error {
	return p.await(ctx, "the default ServiceAccount", func(ctx context.Context) error {
		core := p.client.CoreV1()
		if _, err := core.ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
			return err
		}
		_, err := core.ConfigMaps("default").Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
		return err
	})
}

// await polls try, since neither readiness nor another process's start can be watched. On a busy machine the requests
// delay the start, so the interval is about a tenth of the time since the start, and at most a second.
func (p *Plane) await(ctx context.Context, what string, try func(context.Context) error) error {
	var last error
	interval := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 1.1, Cap: time.Second, Steps: math.MaxInt}
	err := interval.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		select {
		case <-p.finished:
			return false, fmt.Errorf("API server ended: %w", p.failure)
		default:
			last = try(ctx)
			return last == nil, nil
		}
	})
	if err != nil {
		return fmt.Errorf("wait for %s: %w", what, errors.Join(err, last))
	}
	return nil
}

// Client returns a client with every right, for use in this process.
func (p *Plane) Client() kubernetes.Interface { return p.client }

// Address returns host and port of the API server.
func (p *Plane) Address() string { return p.host[len("https://"):] }

// Finished is closed when the API server has ended, asked or not; Err then says why.
func (p *Plane) Finished() <-chan struct{} { return p.finished }

// Err returns why the API server ended. It may be called only after Finished is closed.
func (p *Plane) Err() error { return p.failure }

// CA returns the certificate authority that signed the API server's certificate, in PEM.
func (p *Plane) CA() ([]byte, error) {
	pem, err := os.ReadFile(p.certs.crt("ca"))
	if err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	return pem, nil
}

// Stop ends the control plane, waiting at most for ctx. What has been stored stays.
func (p *Plane) Stop(ctx context.Context) {
	p.cancel()
	select {
	case <-p.finished:
		// etcd waits for its clients to leave, and the last informers may still be at it.
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			p.etcd.Close()
		}()
		select {
		case <-closed:
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
}

// WriteKubeconfig writes the kubeconfig of an administrator to file, in one step: a reader sees nothing or all of it.
func (p *Plane) WriteKubeconfig(file string) error {
	ca, err := p.CA()
	if err != nil {
		return err
	}
	crt, err := os.ReadFile(p.certs.crt("admin"))
	if err != nil {
		return fmt.Errorf("read admin certificate: %w", err)
	}
	key, err := os.ReadFile(p.certs.key("admin"))
	if err != nil {
		return fmt.Errorf("read admin key: %w", err)
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[p.name] = &clientcmdapi.Cluster{Server: p.host, CertificateAuthorityData: ca}
	config.AuthInfos[p.name] = &clientcmdapi.AuthInfo{ClientCertificateData: crt, ClientKeyData: key}
	config.Contexts[p.name] = &clientcmdapi.Context{Cluster: p.name, AuthInfo: p.name}
	config.CurrentContext = p.name
	text, err := clientcmd.Write(*config)
	if err != nil {
		return fmt.Errorf("encode kubeconfig: %w", err)
	}
	half := filepath.Join(filepath.Dir(file), "."+filepath.Base(file)+"."+strconv.Itoa(os.Getpid()))
	if err := os.WriteFile(half, text, 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	if err := os.Rename(half, file); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

// listen opens port of an address, or a free one if port is 0.
func listen(ctx context.Context, bind net.IP, port int) (net.Listener, error) {
	if port != 0 {
		var config net.ListenConfig
		network := "tcp6"
		if bind.To4() != nil {
			network = "tcp4" // for 0.0.0.0, "tcp" means IPv6 too, and the loopback client would depend on it
		}
		listener, err := config.Listen(ctx, network, net.JoinHostPort(bind.String(), strconv.Itoa(port)))
		if err != nil {
			return nil, fmt.Errorf("open the API server's port: %w", err)
		}
		return listener, nil
	}
	// Not from the range (from 32768 on) that Linux hands out to outgoing connections: such a port may be lost to one of
	// them while this control plane is restarted, and a client that dials it meanwhile can end up connected to itself.
	var last error
	for range 100 {
		candidate := 16384 + rand.IntN(16384)
		listener, err := listen(ctx, bind, candidate)
		if err == nil {
			return listener, nil
		}
		last = err
	}
	return nil, last
}
