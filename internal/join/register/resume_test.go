package register_test

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/localkube/faults"
)

func TestRegisterResumesAfterKill(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		// reports is true if the agent has reported before the run is killed.
		reports bool
		// spoil changes the objects of the killed run.
		spoil func(t *testing.T, w testEnv, name string)
	}{
		"before-it-was-through": {true, func(*testing.T, testEnv, string) {}},
		"before-the-deployment": {true, func(t *testing.T, w testEnv, name string) { w.delete(t, name, &appsv1.Deployment{}, "karmada-agent") }},
		"without-an-identity": {false, func(t *testing.T, w testEnv, name string) {
			w.setKubeconfig(t, name, []byte("none"))
		}},
		"by-a-program": {false, func(t *testing.T, w testEnv, name string) {
			trace := filepath.Join(t.TempDir(), "trace")
			w.setKubeconfig(t, name, w.kubeconfigOfUser(t, &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
				APIVersion: "client.authentication.k8s.io/v1", Command: "touch", Args: []string{trace}, InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
			}}, w.plane.Config.Host, nil))
			t.Cleanup(func() {
				if _, err := os.Stat(trace); err == nil {
					t.Error("the kubeconfig has run a program")
				}
			})
		}},
		"with-a-file": {false, func(t *testing.T, w testEnv, name string) {
			file := filepath.Join(t.TempDir(), "token")
			if err := os.WriteFile(file, []byte("text-of-the-file"), 0o600); err != nil {
				t.Fatal(err)
			}
			server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, request *http.Request) {
				t.Errorf("the server of the kubeconfig gets a request with Authorization %q", request.Header.Get("Authorization"))
			}))
			t.Cleanup(server.Close)
			authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
			w.setKubeconfig(t, name, w.kubeconfigOfUser(t, &clientcmdapi.AuthInfo{TokenFile: file}, server.URL, authority))
		}},
	}
	for kind, c := range cases {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			w := newTestEnv(t)
			name := "killed-" + kind
			r, _, _ := w.request(t, name)
			if c.reports {
				w.runAgent(t, name)
			} else {
				w.setReadyWithoutReport(t, name)
			}
			if err := register.Register(t.Context(), r); err != nil {
				t.Fatal(err)
			}
			w.setUnfinished(t, name)
			c.spoil(t, w, name)
			second, out, _ := w.request(t, name)
			second.Member, second.Token = r.Member, r.Token
			if err := register.Register(t.Context(), second); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(expectedLines(name), out.get()); diff != "" {
				t.Errorf("lines (-want +got):\n%s", diff)
			}
		})
	}
}

func TestResumeNeedsTheSameControlPlane(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, _ := w.request(t, "strayed")
	w.runAgent(t, "strayed")
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	w.setUnfinished(t, "strayed")
	before := w.kubeconfig(t, "strayed")
	for name, c := range map[string]struct {
		change func(*register.Request)
		want   string
	}{
		"other control plane": {
			func(r *register.Request) { r.Endpoint = "127.0.0.1:1" },
			"an unfinished registration as strayed with another control plane, " + w.plane.Config.Host + ", and not with https://127.0.0.1:1: remove that with `karmadactl unregister strayed`",
		},
		"other authority": {
			func(r *register.Request) { r.Pins = []string{"sha256:" + strings.Repeat("0", 64)} },
			"none of the public keys",
		},
	} {
		other := r
		c.change(&other)
		if err := register.Register(t.Context(), other); err == nil {
			t.Errorf("%s: got no error", name)
		} else {
			wantText(t, err, c.want)
		}
		if diff := cmp.Diff(before, w.kubeconfig(t, "strayed")); diff != "" {
			t.Errorf("%s: kubeconfig (-before +after):\n%s", name, diff)
		}
	}
	r.Pins[0] = strings.ToUpper(r.Pins[0])
	if err := register.Register(t.Context(), r); err != nil {
		t.Error(err)
	}
}

func TestFailureAfterResumeRollsBack(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, _ := w.request(t, "over")
	w.runAgent(t, "over")
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	w.setUnfinished(t, "over")
	member := r.Member
	// The fourth of its writes is the ClusterRoleBinding.
	f := &faults.Fault{At: 4, Effect: faults.Forbid}
	r.Member = f.On(member)
	wantText(t, register.Register(t.Context(), r), "not you")
	w.awaitNoObjects(t, "over")
	r.Member = member
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
}

func TestRollbackKeepsNamespaceReservedByAnotherRun(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, _ := w.request(t, "reserved")
	theirs := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{
		Name:        register.AgentRole("reserved"),
		Labels:      map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: "reserved"},
		Annotations: map[string]string{rollback.AttemptAnnotation: "theirs"},
	}}
	// The ClusterRole is written first.
	f := &faults.Fault{At: 1, Effect: func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		if err := w.admin.Create(t.Context(), theirs); err != nil {
			t.Error(err)
		}
		return next.RoundTrip(request)
	}}
	r.Member = f.On(r.Member)
	wantText(t, register.Register(t.Context(), r), "it has just been made by somebody else")
	for _, obj := range []client.Object{
		theirs, &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "reserved"}},
	} {
		if err := w.admin.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil || obj.GetDeletionTimestamp() != nil {
			t.Errorf("%T: got error %v and deletion at %v, want that it stays", obj, err, obj.GetDeletionTimestamp())
		}
	}
}
