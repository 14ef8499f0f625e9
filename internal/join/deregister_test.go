package join_test

import (
	"errors"
	"net/http"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

func TestForbiddenDeregisterLeavesNoOptions(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "refused")
	registered(t, plane, pullRequest(n, "c"))
	refusing := rest.CopyConfig(plane.Config)
	refusing.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method == http.MethodDelete {
				return nil, errors.New("you may not")
			}
			return next.RoundTrip(request)
		})
	})
	r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, KeepAddons: true, Force: true, Wait: -1}
	_, err := join.Deregister(t.Context(), refusing, r)
	wantText(t, err, "you may not")
	if cluster := clusterNamed(t, hubClient, n, "c"); cluster.Annotations[kube.AnnotationDeregister] != "" || !cluster.DeletionTimestamp.IsZero() {
		t.Errorf("the cluster has annotations %v", cluster.Annotations)
	}
}
