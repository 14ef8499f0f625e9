package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// ApplyRequest asks to register a cluster in pull mode and to start its agent there.
type ApplyRequest struct {
	PullRequest
	// Member is the configuration for the cluster. Only this call uses it: neither the hub nor the agent gets it.
	Member *rest.Config
	// Wait is how long the agent may take until the cluster is ready. 0: do not wait.
	Wait time.Duration
	// Progress is called with one line for each change of the state that is waited for.
	Progress func(string)
}

// ErrNotReady is returned if a cluster is registered and its agent applied, but it was not ready in time. Nothing is
// rolled back.
var ErrNotReady = errors.New("the cluster is registered and its agent is applied, but it is not ready")

// RegisterAndApply registers a cluster in pull mode, applies the manifest to the member, writes the output of `kubectl
// apply` to out, and waits until the cluster is ready; it returns the member's Kubernetes version then. If registering
// or applying fails, or ctx ends meanwhile, both sides are rolled back. If waiting fails, it returns ErrNotReady and
// rolls nothing back.
func RegisterAndApply(ctx context.Context, hub *rest.Config, request ApplyRequest, out io.Writer) (version string, err error) {
	if err := request.Validate(); err != nil {
		return "", err
	}
	// Checked first, since a registration may revoke tokens, which cannot be rolled back.
	if err := checkAccess(ctx, request.Member); err != nil {
		return "", fmt.Errorf("ask the cluster: %w", err)
	}
	r, err := newRegistration(hub, request.Request)
	if err != nil {
		return "", err
	}
	a, err := newApplication(r.hub, request)
	if err != nil {
		return "", err
	}
	if err := a.checkName(ctx); err != nil {
		return "", err
	}
	if err := a.awaitRemoval(ctx); err != nil {
		return "", err
	}
	if err := a.checkAgent(ctx, hub); err != nil {
		return "", err
	}
	r.log.Add(a.log.RollBack)
	manifest := writerFunc(func(manifest []byte) error {
		// An agent that exists has no token for heartbeats yet, or uses its earlier one: only later heartbeats count.
		var err error
		if a.heartbeat, err = a.readHeartbeat(ctx); err != nil {
			return err
		}
		return a.applyManifest(ctx, manifest, out)
	})
	err = r.run(ctx, func() error { return r.registerPull(ctx, hub, request.PullRequest, manifest) })
	if err != nil || request.Wait <= 0 {
		return "", err
	}
	return a.awaitReady(ctx)
}

// application applies the agent's manifest to a member.
type application struct {
	hub       client.Client
	member    client.Client
	resources foreign.Resources
	request   ApplyRequest
	log       *rollback.Log
	// formerSecret is the name of the Secret of an agent that is replaced, "" if there is none.
	formerSecret string
	// heartbeat is the last heartbeat of an agent before the manifest was applied.
	heartbeat *metav1.MicroTime
	// progress is the last call of Progress.
	progress string
}

func newApplication(hub client.Client, request ApplyRequest) (*application, error) {
	config := rest.CopyConfig(request.Member)
	config.Timeout = accessTimeout
	member, resources, err := newClient(config)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	log := rollback.New(member, string(uuid.NewUUID()))
	return &application{hub: hub, member: member, resources: resources, request: request, log: log}, nil
}

// applyManifest applies the manifest and writes the output of kubectl.
func (a *application) applyManifest(ctx context.Context, manifest []byte, out io.Writer) error {
	objects, err := kube.DecodeManifest(manifest)
	if err != nil {
		return fmt.Errorf("read the agent's manifest: %w", err)
	}
	var lines bytes.Buffer
	for _, obj := range objects {
		result, err := a.applyObject(ctx, obj)
		if err != nil {
			return fmt.Errorf("apply to the cluster: %w", err)
		}
		fmt.Fprintf(&lines, "%s %s\n", kubectlName(obj), result)
	}
	if a.formerSecret != "" {
		deleted, err := a.log.Delete(ctx, &corev1.Secret{ObjectMeta: named(kube.AgentNamespace, a.formerSecret)})
		if err != nil {
			return fmt.Errorf("on the cluster: %w", err)
		}
		if deleted {
			fmt.Fprintf(&lines, "secret/%s deleted\n", a.formerSecret)
		}
	}
	if _, err := out.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("print what was applied: %w", err)
	}
	return nil
}

// applyObject applies one object of the manifest. The rollback keeps a namespace that it created if another party has
// objects in it, for example the hub of a registration in push mode.
func (a *application) applyObject(ctx context.Context, obj *unstructured.Unstructured) (rollback.Result, error) {
	if obj.GroupVersionKind() == corev1.SchemeGroupVersion.WithKind("Namespace") {
		namespace := &corev1.Namespace{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, namespace); err != nil {
			return "", fmt.Errorf("read Namespace %s of the manifest: %w", obj.GetName(), err)
		}
		created, err := createNamespace(ctx, a.member, a.log, namespace, func(ctx context.Context) (string, error) {
			return foreign.Find(ctx, a.member, a.resources, namespace.Name, isDependentOfAgent)
		})
		if err != nil {
			return "", err
		}
		if created {
			return rollback.Created, nil
		}
	}
	_, result, err := a.log.Apply(ctx, obj, nil)
	return result, err
}

// isDependentOfAgent returns whether controllers created the object for the Deployment or the Service of an agent, so
// that the garbage collector deletes it with them.
func isDependentOfAgent(item *metav1.PartialObjectMetadata) bool {
	return item.Labels[agentNameLabel] == agentName && metav1.GetControllerOf(item) != nil
}

// kubectlName names an object as kubectl does: kind.group/name, in lower case.
func kubectlName(obj *unstructured.Unstructured) string {
	gvk := obj.GroupVersionKind()
	name := strings.ToLower(gvk.Kind)
	if gvk.Group != "" {
		name += "." + gvk.Group
	}
	return name + "/" + obj.GetName()
}

// writerFunc is a function that takes a whole manifest in one call.
type writerFunc func([]byte) error

// Write calls the function.
func (f writerFunc) Write(p []byte) (int, error) {
	if err := f(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
