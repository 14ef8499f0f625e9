package localkube

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// testStartLimit is how long a control plane may take to become ready in a test, on cores shared with many other tests.
const testStartLimit = 3 * time.Minute

// Option changes how ForTest starts a control plane.
type Option func(*Options)

// Named gives the control plane a name.
func Named(name string) Option {
	return func(o *Options) { o.Name = name }
}

// WithExec runs containers of image as processes of program.
func WithExec(image, program string) Option {
	return func(o *Options) {
		if o.Exec == nil {
			o.Exec = map[string]string{}
		}
		o.Exec[image] = program
	}
}

// WithNetwork runs the control plane and the processes of its pods in a network namespace, with its API server at an address there.
func WithNetwork(network Network, address string) Option {
	return func(o *Options) { o.Network, o.Address = network, address }
}

// ForTest starts a control plane of the test's own, which is stopped when the test ends. Its errors are logged if the test failed.
func ForTest(t testing.TB, options ...Option) *Plane {
	t.Helper()
	p, err := start(t, options)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// SeveralForTest is ForTest for as many control planes as there are names, started at the same time.
func SeveralForTest(t testing.TB, names []string, options ...Option) []*Plane {
	t.Helper()
	var (
		planes   = make([]*Plane, len(names))
		failures = make([]error, len(names))
		starting sync.WaitGroup
	)
	for i, name := range names {
		starting.Go(func() { planes[i], failures[i] = start(t, append([]Option{Named(name)}, options...)) })
	}
	starting.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	return planes
}

// start starts a control plane that is stopped when the test ends.
func start(t testing.TB, options []Option) (*Plane, error) {
	opts := Options{Dir: t.TempDir()}
	for _, change := range options {
		change(&opts)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testStartLimit)
	defer cancel()
	p, err := Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
		if log := p.Log(); t.Failed() && log != "" {
			t.Logf("errors of control plane %s:\n%s", p.Name, log)
		}
	})
	return p, nil
}

// shared starts the control plane of this test binary on first use. The lifeline stops it with the binary.
//
//nolint:gochecknoglobals // one per test binary is the point, and it never changes
var shared = sync.OnceValues(func() (*Plane, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testStartLimit)
	defer cancel()
	return Start(ctx, Options{Name: "shared"})
})

// Shared returns a control plane that all tests of this test binary share, started on first use and stopped when the binary ends.
// Use it where tests keep to a Namespace of their own, or to cluster-wide names that no other test uses.
func Shared(t testing.TB) *Plane {
	t.Helper()
	p, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Namespace creates a namespace whose name starts with prefix and is used by no other test. It is deleted when the test ends.
func (p *Plane) Namespace(t testing.TB, prefix string) string {
	t.Helper()
	client := kubernetes.NewForConfigOrDie(p.Config).CoreV1().Namespaces()
	namespace, err := client.Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create namespace %s: %v", prefix, err)
	}
	t.Cleanup(func() {
		if err := client.Delete(context.WithoutCancel(t.Context()), namespace.Name, metav1.DeleteOptions{}); err != nil {
			t.Logf("delete namespace %s: %v", namespace.Name, err)
		}
	})
	return namespace.Name
}
