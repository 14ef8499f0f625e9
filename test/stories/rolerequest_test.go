package stories

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

// profileOfAccount deploys as a ServiceAccount, which need not exist.
const profileOfAccount = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: web}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: build, name: web}
    data: {text: "of devops"}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata:
  name: web
  labels: {projectsveltos.io/serviceaccount-namespace: eng, projectsveltos.io/serviceaccount-name: devops}
spec:
  clusterSelector: {matchLabels: {env: internal}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: web}
`

const roleRequest = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: eng-access}
data:
  build.yaml: |
    apiVersion: rbac.authorization.k8s.io/v1
    kind: Role
    metadata: {namespace: build, name: edit}
    rules:
    - {apiGroups: [""], resources: [configmaps], verbs: [create, patch, delete]}
---
apiVersion: lib.projectsveltos.io/v1beta1
kind: RoleRequest
metadata: {name: eng-access}
spec:
  clusterSelector: {matchLabels: {env: internal}}
  serviceAccountNamespace: eng
  serviceAccountName: devops
  roleRefs:
  - {kind: ConfigMap, namespace: default, name: eng-access}
`

// TestRoleRequest gives a ServiceAccount rights on a member in each mode. A profile is deployed as this ServiceAccount,
// and fails before that. When the RoleRequest is deleted, the rights are withdrawn.
func TestRoleRequest(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := map[string]*localkube.Plane{"pulled": w.pullMember("fleet-pulled", "pulled", "env=internal"), "pushed": w.pushMember("fleet-pushed", "pushed", "env=internal")}
	everywhere := func(what string, check func(cluster string, member *localkube.Plane) error) {
		t.Helper()
		for cluster, member := range members {
			w.eventually(what+" on "+cluster, func() error { return check(cluster, member) })
		}
	}
	w.apply(w.hub, profileOfAccount)
	everywhere("the ServiceAccount has no rights", func(cluster string, _ *localkube.Plane) error {
		summary := &configv1beta1.ClusterSummary{}
		if err := w.client(w.hub).Get(t.Context(), client.ObjectKey{Namespace: "fleet-" + cluster, Name: "web-sveltos-" + cluster}, summary); err != nil {
			return err
		}
		for _, feature := range summary.Status.FeatureSummaries {
			if strings.Contains(feature.FailureMessage, "system:serviceaccount:eng:devops") {
				return nil
			}
		}
		return fmt.Errorf("the features are %+v", summary.Status.FeatureSummaries)
	})

	w.apply(w.hub, roleRequest)
	everywhere("the ServiceAccount has the rights", func(cluster string, member *localkube.Plane) error {
		data, err := w.data(member, "build", "web")
		if err == nil && data["text"] != "of devops" {
			err = fmt.Errorf("the data is %v", data)
		}
		return errors.Join(err, w.wantStatuses("fleet-"+cluster, "role-request-eng-access-sveltos-"+cluster, "Provisioned"),
			w.wantStatuses("fleet-"+cluster, "web-sveltos-"+cluster, "Provisioned"))
	})
	request := &libv1beta1.RoleRequest{}
	w.eventually("the RoleRequest has both clusters", func() error {
		err := w.client(w.hub).Get(t.Context(), client.ObjectKey{Name: "eng-access"}, request)
		if err == nil && (len(request.Status.MatchingClusterRefs) != len(members) || request.Status.FailureMessage != nil) {
			err = fmt.Errorf("the status is %+v", request.Status)
		}
		return err
	})

	w.kubectl(w.hub, "delete", "clusterprofile", "web")
	w.kubectl(w.hub, "delete", "rolerequest", "eng-access", "--timeout=2m")
	everywhere("the rights are withdrawn", func(_ string, member *localkube.Plane) error {
		key := client.ObjectKey{Namespace: "build", Name: "rolerequest:eng-access:edit"}
		for _, obj := range []client.Object{&rbacv1.Role{}, &rbacv1.RoleBinding{}} {
			if err := w.client(member).Get(t.Context(), key, obj); err == nil || !apierrors.IsNotFound(err) {
				return fmt.Errorf("%T still exists, error %v", obj, err) //nolint:errorlint // it can be nil
			}
		}
		return nil
	})
	left := &configv1beta1.ClusterProfileList{}
	if err := w.client(w.hub).List(t.Context(), left); err != nil || len(left.Items) > 0 {
		t.Errorf("%d ClusterProfiles are left, error %v", len(left.Items), err)
	}
}
