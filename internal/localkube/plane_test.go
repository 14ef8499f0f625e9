package localkube_test

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/towline/towline/internal/localkube"
)

func TestTwoPlanesRunConcurrently(t *testing.T) {
	t.Parallel()
	first, second := localkube.ForTest(t, localkube.Named("first")), localkube.ForTest(t, localkube.Named("second"))
	created, err := clientOf(first).CoreV1().ConfigMaps("default").Create(t.Context(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "only-in-first"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = clientOf(second).CoreV1().ConfigMaps("default").Get(t.Context(), created.Name, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("get an object of the first plane from the second: got %v, want not found", err)
	}
	version, err := clientOf(first).Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	if version.GitVersion != "v1.36.3" {
		t.Errorf("version: got %s, want v1.36.3", version.GitVersion)
	}
}

func TestStopLeavesNoPortAndNoTemporaryDirectory(t *testing.T) {
	t.Parallel()
	p, err := localkube.Start(t.Context(), localkube.Options{})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("stop took %s, want about 2 s", took)
	}
	if log := p.Log(); log != "" {
		t.Errorf("errors of a plane that had none:\n%s", log)
	}
	if isListening(p.Port()) {
		t.Errorf("port %d still answers", p.Port())
	}
	if _, err := os.Stat(p.Dir); !os.IsNotExist(err) {
		t.Errorf("stat temporary directory: got %v, want not found", err)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("stop a second time: %v", err)
	}
}

func TestRestartKeepsObjectsAndPort(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*localkube.Plane) error{
		"stopped": (*localkube.Plane).Stop,
		"killed":  (*localkube.Plane).Kill,
		"running": func(*localkube.Plane) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := localkube.ForTest(t)
			client, port := clientOf(p), p.Port()
			namespace := p.Namespace(t, "kept")
			if err := end(p); err != nil {
				t.Fatal(err)
			}
			if err := p.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			// The old client works: port and certificates are the same.
			if _, err := client.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{}); err != nil {
				t.Errorf("get an object from before the restart: %v", err)
			}
			if p.Port() != port {
				t.Errorf("port: got %d, want %d", p.Port(), port)
			}
		})
	}
}

func TestFailedStartHasTheLog(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	_, err = localkube.Start(t.Context(), localkube.Options{Port: taken.Addr().(*net.TCPAddr).Port})
	wantText(t, err, "address already in use")
}

func TestBinaryNamesTheMissingProgram(t *testing.T) {
	t.Parallel()
	_, err := localkube.Binary("no-such-program")
	wantText(t, err, "find no-such-program: run `make build`")
	path, err := localkube.Binary("localkube")
	if err != nil || !filepath.IsAbs(path) {
		t.Errorf("got %q and %v, want an absolute path", path, err)
	}
}

func clientOf(p *localkube.Plane) kubernetes.Interface { return kubernetes.NewForConfigOrDie(p.Config) }

func isListening(port int) bool {
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

func TestRequestsAreCounted(t *testing.T) {
	t.Parallel()
	p := localkube.ForTest(t, localkube.Named("counted"))
	before, err := p.CountRequests(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		created := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "counted-", Namespace: "default"}}
		if _, err := clientOf(p).CoreV1().ConfigMaps("default").Create(t.Context(), created, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	after, err := p.CountRequests(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	creations := after.Since(before).Select(func(r localkube.Request) bool { return r.IsWrite() && r.Resource == "configmaps" && r.Group == "" })
	if creations.Total() < 3 {
		t.Errorf("got these requests, want 3 creations of ConfigMaps:\n%s", after.Since(before))
	}
}
