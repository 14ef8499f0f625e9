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
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
	if err := a.checkAgent(ctx); err != nil {
		return "", err
	}
	r.log.Add(a.log.RollBack)
	apply := func(manifest []byte) error {
		// An agent that exists has no token for heartbeats yet, or uses its earlier one: only later heartbeats count.
		var err error
		if _, a.heartbeat, err = a.readHub(ctx); err != nil {
			return err
		}
		return a.applyManifest(ctx, manifest, out)
	}
	err = r.run(ctx, func() error { return r.registerPull(ctx, hub, request.PullRequest, apply) })
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
	// heartbeat is the last heartbeat of an agent before the manifest was applied.
	heartbeat *metav1.MicroTime
	// progress is the last call of Progress.
	progress string
}

func newApplication(hub client.Client, request ApplyRequest) (*application, error) {
	config := rest.CopyConfig(request.Member)
	config.Timeout = accessTimeout
	member, resources, err := NewClient(config)
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
	if err := a.awaitUninstallation(ctx, objects); err != nil {
		return err
	}
	var lines bytes.Buffer
	for _, obj := range objects {
		result, err := a.applyObject(ctx, obj)
		if err != nil {
			return fmt.Errorf("apply to the cluster: %w", err)
		}
		fmt.Fprintf(&lines, "%s %s\n", kubectlName(obj), result)
	}
	if _, err := out.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("print what was applied: %w", err)
	}
	return nil
}

// awaitUninstallation waits until a former agent is removed from the cluster. The agent answers the hub before it
// removes itself, so that a deregistration may have succeeded already. Only an agent that is being removed has owners.
func (a *application) awaitUninstallation(ctx context.Context, objects []*unstructured.Unstructured) error {
	var refs []kube.Ref
	for _, obj := range objects {
		refs = append(refs, kube.RefOf(obj))
	}
	role := &rbacv1.ClusterRole{ObjectMeta: named("", agentRole)}
	find := func(ctx context.Context) (string, error) { return FindUninstalled(ctx, a.member, role, refs) }
	return AwaitUninstallation(ctx, a.request.Wait, find, func(object string) {
		a.report("a former agent is still being removed from it: " + object)
	})
}

// applyObject applies one object of the manifest.
func (a *application) applyObject(ctx context.Context, obj *unstructured.Unstructured) (rollback.Result, error) {
	namespace := &corev1.Namespace{}
	if obj.GetKind() == "Namespace" {
		found, err := read(ctx, a.member, namespace, client.ObjectKey{Name: obj.GetName()})
		if err != nil {
			return "", err
		}
		if !found {
			namespace.Name, namespace.Labels, namespace.Annotations = obj.GetName(), obj.GetLabels(), obj.GetAnnotations()
			return rollback.Created, ensureNamespace(ctx, a.member, a.log, a.resources, namespace)
		}
	}
	_, result, err := a.log.Apply(ctx, obj, nil)
	return result, err
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
