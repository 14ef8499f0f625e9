package join_test

import (
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

// anotherUnderTheName registers the hub under the name of the member, in both ways.
func anotherUnderTheName(t *testing.T, p push) {
	cluster := p.register(t, p.request("c"))
	if cluster.Annotations[kube.AnnotationMember] == "" {
		t.Errorf("annotations are %v, want which member it is", cluster.Annotations)
	}
	kubeconfig, err := os.ReadFile(p.hub.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	other := p.request("c")
	other.Member = p.hub.Config
	const want = "is another cluster"
	wantText(t, join.RegisterPush(t.Context(), p.hub.Config, other), want)
	other.Member, other.Kubeconfig = nil, kubeconfig
	wantText(t, join.RegisterPush(t.Context(), p.hub.Config, other), want)
	again := p.register(t, p.request("c"))
	if got, want := again.Annotations[kube.AnnotationMember], cluster.Annotations[kube.AnnotationMember]; got != want {
		t.Errorf("the member is %s, want %s", got, want)
	}
	p.takeOff(t, "c")
}

// refusalIsNoLostRight checks that the refusal of an admission webhook is not taken for lost permissions.
func refusalIsNoLostRight(t *testing.T, p push) {
	cluster := p.register(t, p.request("c"))
	refusing := rest.CopyConfig(p.config(t, cluster))
	refusing.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method != http.MethodGet && strings.Contains(request.URL.Path, "/clusterroles/") {
				return nil, apierrors.NewForbidden(schema.GroupResource{Resource: "clusterroles"}, "projectsveltos", errors.New("by policy"))
			}
			return next.RoundTrip(request)
		})
	})
	wantText(t, join.DeleteMemberObjects(t.Context(), refusing, p.hubUID, cluster), "by policy")
	p.takeOff(t, "c")
}
