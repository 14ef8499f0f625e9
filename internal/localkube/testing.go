package localkube

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// maxPodLog is the number of bytes at the end of a pod's output that a failed test logs.
const maxPodLog = 20_000

// testStartTimeout limits a start in a test. Other tests run on the same cores, so a start can be slow.
const testStartTimeout = 3 * time.Minute

// Option configures a control plane for a test.
type Option func(*Options)

// Named sets the name of the control plane.
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

// WithNetwork runs the control plane and the processes of its pods in a network namespace, with the API server on
// address.
func WithNetwork(network Network, address string) Option {
	return func(o *Options) { o.Network, o.Address = network, address }
}

// ForTest starts a control plane, and kills it when the test ends. If the test failed, it logs the errors of the
// control plane and the output of its pods.
func ForTest(t testing.TB, options ...Option) *Plane {
	t.Helper()
	p, err := startForTest(t, options)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// SeveralForTest is ForTest for one control plane per name. It starts them concurrently, and returns them in the order
// of names.
func SeveralForTest(t testing.TB, names []string, options ...Option) []*Plane {
	t.Helper()
	var (
		planes = make([]*Plane, len(names))
		errs   = make([]error, len(names))
		starts sync.WaitGroup
	)
	for i, name := range names {
		starts.Go(func() { planes[i], errs[i] = startForTest(t, append([]Option{Named(name)}, options...)) })
	}
	starts.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return planes
}

// startForTest starts a control plane, and kills it when the test ends, because a graceful stop takes a second. The
// test fails if the control plane has ended before.
func startForTest(t testing.TB, options []Option) (*Plane, error) {
	opts := Options{Dir: t.TempDir()}
	if _, isBenchmark := t.(*testing.B); !isBenchmark {
		// Tests run many control planes at the same time. With one processor, each uses a fifth less processor time.
		opts.Processors = 1
	}
	for _, change := range options {
		change(&opts)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testStartTimeout)
	defer cancel()
	p, err := Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if err := p.killRunning(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			p.writeLogs(t)
		}
	})
	return p, nil
}

// writeLogs logs the errors of the control plane and the end of the output of each of its pods.
func (p *Plane) writeLogs(t testing.TB) {
	if log := p.Log(); log != "" {
		t.Logf("errors of control plane %s:\n%s", p.Name, log)
	}
	// The pattern is valid.
	files, _ := filepath.Glob(filepath.Join(p.Dir, "pods", "*.log"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Log(err)
			continue
		}
		t.Logf("output of %s of control plane %s:\n%s", strings.TrimSuffix(filepath.Base(file), ".log"), p.Name, text[max(0, len(text)-maxPodLog):])
	}
}

// shared starts the control plane of this test binary at the first call. The lifeline ends it with the binary.
//
//nolint:gochecknoglobals // one per test binary is the point, and it never changes
var shared = sync.OnceValues(func() (*Plane, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testStartTimeout)
	defer cancel()
	return Start(ctx, Options{Name: "shared"})
})

// Shared returns a control plane for all tests of this test binary. The first call starts it, and it stops when the
// binary ends. A test must use its own Namespace, and names of cluster-scoped objects that no other test uses.
func Shared(t testing.TB) *Plane {
	t.Helper()
	p, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Namespace creates a namespace with a unique name that starts with prefix. It is not deleted at the end of the test:
// deleting hundreds of namespaces would delay, by minutes, the deletions that other tests wait for.
func (p *Plane) Namespace(t testing.TB, prefix string) string {
	t.Helper()
	namespace, err := kubernetes.NewForConfigOrDie(p.Config).CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create namespace %s: %v", prefix, err)
	}
	return namespace.Name
}
