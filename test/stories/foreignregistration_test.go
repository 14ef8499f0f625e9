package stories

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// TestForeignRegistration deregisters clusters that the sveltosctl of Sveltos registered in pull mode: with a hub and
// without one, with kubectl alone, and after the deletion of their SveltosCluster. The identity of the agent stays and
// is listed, and the listed commands delete it.
func TestForeignRegistration(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)

	t.Run("with a hub", func(t *testing.T) {
		w := w.forSubtest(t)
		w.registerForeign("prod-cluster")
		w.wantForeignRefused("prod-cluster")
		agent := w.foreignAgentConfig("prod-cluster")
		w.wantForeignDeregistered("prod-cluster")
		w.eventually("the hub refuses its tokens", func() error {
			if err := wantGroupsReadable(w, agent); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("got error %w, want Unauthorized", err)
			}
			return nil
		})
	})
	t.Run("with kubectl", func(t *testing.T) {
		w := w.forSubtest(t)
		w.registerForeign("by-kubectl")
		w.wantForeignRefused("by-kubectl")
		w.kubectl(w.hub, "delete", "sveltoscluster", "by-kubectl", "-n", "fleet", "--timeout=60s")
		reason := "ServiceAccount fleet/by-kubectl: Towline did not create it; to delete it: kubectl delete serviceaccount by-kubectl -n fleet"
		w.eventually("an event has the reason", func() error { return w.wantEvent("by-kubectl", reason) })
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=by-kubectl")
		wantError(t, err, reason, "deregister cluster fleet/by-kubectl: the cluster is not registered")
		if found := w.listClusterObjects("by-kubectl"); len(found) != 6 {
			t.Errorf("the hub has %q, want the six objects of the identity", found)
		}
	})

	w.hubProcess.kill()
	t.Run("without a hub", func(t *testing.T) {
		w := w.forSubtest(t)
		w.registerForeign("hubless")
		w.wantForeignDeregistered("hubless")
	})
}

// registerForeign creates the objects that the sveltosctl of Sveltos creates on the hub for a cluster in namespace
// fleet.
func (w *world) registerForeign(cluster string) {
	w.t.Helper()
	raw, err := os.ReadFile("../../internal/join/testdata/sveltos-registration.yaml")
	if err != nil {
		w.t.Fatal(err)
	}
	w.apply(w.hub, strings.NewReplacer("NAMESPACE", "fleet", "CLUSTER", cluster).Replace(string(raw)))
}

// wantForeignRefused waits until the hub reports that it does not take over a cluster.
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

// wantForeignDeregistered deregisters a cluster. The command must delete the SveltosCluster, and list the identity with
// the commands that delete it. wantForeignDeregistered runs these commands.
func (w *world) wantForeignDeregistered(cluster string) {
	w.t.Helper()
	place := "fleet/" + cluster
	out, err := w.tryCombined(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster="+cluster)
	if err != nil {
		w.t.Fatal(err)
	}
	want := "Successfully deregistered cluster " + place + "\n\nDeleted resources:\n  - SveltosCluster/" + place + "\n"
	if !strings.Contains(out, want+"note: these objects stay on the hub") {
		w.t.Errorf("deregister printed %q, want %q in it", out, want)
	}
	commands := regexp.MustCompile(`(?m): Towline did not create it; to delete it: kubectl (.*)$`).FindAllStringSubmatch(out, -1)
	if len(commands) != 6 {
		w.t.Errorf("deregister printed %q, want six objects that stay", out)
	}
	for _, command := range commands {
		// Kubernetes deletes the token Secret of a ServiceAccount that is deleted.
		w.kubectl(w.hub, append(strings.Fields(command[1]), "--ignore-not-found")...)
	}
	if found := w.listClusterObjects(cluster); len(found) > 0 {
		w.t.Errorf("the hub still has %q", found)
	}
}

// foreignAgentConfig returns a client configuration with the credential of the agent of a cluster.
func (w *world) foreignAgentConfig(cluster string) *rest.Config {
	w.t.Helper()
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken = strings.TrimSpace(w.kubectl(w.hub, "create", "token", cluster, "-n", "fleet"))
	if err := wantGroupsReadable(w, config); err != nil {
		w.t.Fatal(err)
	}
	return config
}

// wantGroupsReadable returns an error unless a credential may read the groups in namespace fleet.
func wantGroupsReadable(w *world, config *rest.Config) error {
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

// wantEvent returns an error unless a warning about a cluster in namespace fleet has a text.
func (w *world) wantEvent(cluster, text string) error {
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
