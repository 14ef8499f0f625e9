package stories

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// foreignUses make something else use one object of the registrations of clusters "guest" and "lodger".
const foreignUses = `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: fleet, name: guest-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: guest}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: guests}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lodger-viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{kind: ServiceAccount, namespace: fleet, name: lodger}]
`

// TestForeignRegistration takes clusters out of the fleet that the sveltosctl of Sveltos registered in pull mode: with
// a hub and without one, with kubectl alone, after their SveltosCluster, and where something else uses a part of their
// identity.
func TestForeignRegistration(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)

	t.Run("with a hub", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("prod-cluster")
		w.wantForeignRefused("prod-cluster")
		agent := w.foreignAgent("prod-cluster")
		w.wantForeignDeregistered("prod-cluster", "SveltosCluster/fleet/prod-cluster")
		w.eventually("its tokens are worthless", func() error {
			if err := mayReadGroups(w, agent); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("got error %w, want Unauthorized", err)
			}
			return nil
		})
	})
	t.Run("with kubectl", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("by-kubectl")
		w.wantForeignRefused("by-kubectl")
		w.kubectl(w.hub, "delete", "sveltoscluster", "by-kubectl", "-n", "fleet", "--timeout=60s")
		w.wantNoTrace("by-kubectl")
	})
	t.Run("a Role that others have", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("guest")
		w.apply(w.hub, foreignUses)
		w.wantForeignRefused("guest")
		out, err := w.tryBoth(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=guest")
		if err != nil {
			t.Fatal(err)
		}
		want := "  - Role rbac.authorization.k8s.io fleet/guest: RoleBinding fleet/guest-reader grants it; " +
			"to delete it: kubectl delete role guest -n fleet\n"
		if !strings.Contains(out, want) || strings.Contains(out, "  - Role/fleet/guest\n") {
			t.Errorf("deregister printed %q, want %q in it", out, want)
		}
		if diff := cmp.Diff([]string{"Role fleet guest", "RoleBinding fleet guest-reader"}, w.traces("guest")); diff != "" {
			t.Errorf("objects that stay (-want +got):\n%s", diff)
		}
	})
	t.Run("a ServiceAccount with other rights", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("lodger")
		w.wantForeignRefused("lodger")
		w.kubectl(w.hub, "delete", "sveltoscluster", "lodger", "-n", "fleet", "--timeout=60s")
		kept := []string{"ServiceAccount fleet lodger", "Secret fleet lodger", "ClusterRoleBinding <none> lodger-viewer"}
		if diff := cmp.Diff(kept, w.traces("lodger")); diff != "" {
			t.Errorf("objects that stay (-want +got):\n%s", diff)
		}
		reason := "ServiceAccount fleet/lodger: ClusterRoleBinding lodger-viewer names it; to delete it: kubectl delete serviceaccount lodger -n fleet"
		w.eventually("an event tells it", func() error { return w.hasEvent("lodger", reason) })
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=lodger")
		wantError(t, err, reason, "deregister cluster fleet/lodger: the cluster is not registered")
	})

	w.hubOS.kill()
	t.Run("without a hub", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("hubless")
		w.wantForeignDeregistered("hubless", "SveltosCluster/fleet/hubless")
	})
	t.Run("after its SveltosCluster", func(t *testing.T) {
		w := w.in(t)
		w.registerForeign("orphan")
		w.kubectl(w.hub, "delete", "sveltoscluster", "orphan", "-n", "fleet", "--timeout=60s")
		w.wantForeignDeregistered("orphan")
	})
}

// registerForeign makes what the sveltosctl of Sveltos makes on the hub for a cluster in namespace fleet.
func (w *world) registerForeign(cluster string) {
	w.t.Helper()
	raw, err := os.ReadFile("../../internal/join/testdata/sveltos-registration.yaml")
	if err != nil {
		w.t.Fatal(err)
	}
	w.apply(w.hub, strings.NewReplacer("NAMESPACE", "fleet", "CLUSTER", cluster).Replace(string(raw)))
}

// wantForeignRefused waits until the hub says that it does not take a cluster over.
func (w *world) wantForeignRefused(cluster string) {
	w.t.Helper()
	w.eventually("the hub refuses "+cluster, func() error {
		out, err := w.try(w.hub, "kubectl", "get", "sveltoscluster", cluster, "-n", "fleet", "-o", "jsonpath={.status.failureMessage}")
		if err != nil {
			return err
		}
		if want := "ServiceAccount fleet/" + cluster + " exists and was not made by a registration"; !strings.Contains(out, want) {
			return fmt.Errorf("its message is %q", out)
		}
		return nil
	})
}

// wantForeignDeregistered deregisters a cluster, and wants the command to name what it deletes, first some objects and
// then the identity, and nothing to stay.
func (w *world) wantForeignDeregistered(cluster string, first ...string) {
	w.t.Helper()
	place := "fleet/" + cluster
	want := "Successfully deregistered cluster " + place + "\n\nDeleted resources:\n"
	for _, deleted := range append(first, "ServiceAccount/"+place, "Secret/"+place, "Role/"+place, "ClusterRole/fleet-"+cluster,
		"RoleBinding/"+place, "ClusterRoleBinding/fleet-"+cluster) {
		want += "  - " + deleted + "\n"
	}
	out, err := w.tryBoth(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster="+cluster)
	if err != nil {
		w.t.Fatal(err)
	}
	// On a busy machine, the command reports its progress.
	progress := regexp.MustCompile(`(?m)^waiting for the hub to finish removing cluster .*\n`)
	if diff := cmp.Diff(want, progress.ReplaceAllString(out, "")); diff != "" {
		w.t.Errorf("deregister (-want +got):\n%s", diff)
	}
	if found := w.traces(cluster); len(found) > 0 {
		w.t.Errorf("the hub still has %q", found)
	}
}

// foreignAgent returns how the agent of a cluster connects to the hub.
func (w *world) foreignAgent(cluster string) *rest.Config {
	w.t.Helper()
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken = strings.TrimSpace(w.kubectl(w.hub, "create", "token", cluster, "-n", "fleet"))
	if err := mayReadGroups(w, config); err != nil {
		w.t.Fatal(err)
	}
	return config
}

// mayReadGroups says what is wrong unless a credential lets its holder read what is delivered in namespace fleet.
func mayReadGroups(w *world, config *rest.Config) error {
	agent, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return err
	}
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: "fleet", Verb: "list", Group: "lib.projectsveltos.io", Resource: "configurationgroups",
		},
	}}
	if err := agent.Create(w.t.Context(), review); err != nil {
		return err
	}
	if !review.Status.Allowed {
		return errors.New("it may not read the groups")
	}
	return nil
}

// hasEvent says what is wrong unless a warning about a cluster in namespace fleet has a text.
func (w *world) hasEvent(cluster, text string) error {
	out, err := w.try(w.hub, "kubectl", "get", "events", "-n", "fleet", "-o",
		`jsonpath={range .items[?(@.reason=="LeftBehind")]}{.involvedObject.name}: {.message}{"\n"}{end}`)
	if err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, cluster+": ") && strings.Contains(line, text) {
			return nil
		}
	}
	return fmt.Errorf("the events are %q", out)
}
