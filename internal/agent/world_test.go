package agent_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// world is a hub and one registered pull-mode member with its own control plane.
type world struct {
	t           *testing.T
	hub, member *localkube.Plane
	hubClient   client.Client
	client      client.Client // of the member
	transport   *deliver.PullTransport
	cluster     client.ObjectKey
	// changeKubeconfig changes the kubeconfig in manifests before they are applied.
	changeKubeconfig func(*clientcmdapi.Config)
}

// newWorld registers a new member in a new namespace of the hub that most tests share.
func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOn(t, localkube.Shared(t))
}

// newWorldOn is newWorld on another hub.
func newWorldOn(t *testing.T, hub *localkube.Plane) *world {
	t.Helper()
	w := &world{
		t: t, hub: hub, member: localkube.ForTest(t, localkube.Named("member")),
		cluster: client.ObjectKey{Namespace: hub.Namespace(t, "edge"), Name: "c1"},
	}
	w.hubClient, w.client = w.clientOf(w.hub), w.clientOf(w.member)
	w.installCRDs()
	w.register()
	key, err := deliver.LoadOrCreateKey(t.Context(), w.hubClient)
	if err != nil {
		t.Fatal(err)
	}
	if w.transport, err = deliver.NewPullTransport(w.hubClient, w.hubClient, key); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) clientOf(plane *localkube.Plane) client.Client {
	w.t.Helper()
	c, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w *world) installCRDs() {
	w.t.Helper()
	if err := crds.Install(w.t.Context(), w.hubClient); err != nil {
		w.t.Fatal(err)
	}
}

// register registers the member and applies the objects of the manifest that an agent outside a Pod needs.
func (w *world) register() {
	w.t.Helper()
	w.applyAgent(w.manifest())
}

func (w *world) applyAgent(manifest []*unstructured.Unstructured) {
	w.t.Helper()
	w.apply(slices.DeleteFunc(manifest, func(obj *unstructured.Unstructured) bool {
		return obj.GetKind() != "Namespace" && obj.GetKind() != "Secret"
	}))
}

// manifest registers the member and returns the objects of the manifest.
func (w *world) manifest() []*unstructured.Unstructured {
	w.t.Helper()
	var manifest bytes.Buffer
	r := join.PullRequest{Request: join.Request{Namespace: w.cluster.Namespace, Name: w.cluster.Name, Labels: map[string]string{"env": "test"}}}
	if err := join.RegisterPull(w.t.Context(), w.hub.Config, r, &manifest); err != nil {
		w.t.Fatal(err)
	}
	objects, err := kube.DecodeManifest(manifest.Bytes())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, obj := range objects {
		if obj.GetKind() == "Secret" && w.changeKubeconfig != nil {
			w.rewriteKubeconfig(obj)
		}
	}
	return objects
}

// rewriteKubeconfig applies changeKubeconfig to the kubeconfig in a manifest's Secret.
func (w *world) rewriteKubeconfig(secret *unstructured.Unstructured) {
	w.t.Helper()
	text, _, _ := unstructured.NestedString(secret.Object, "data", join.KubeconfigKey)
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		w.t.Fatal(err)
	}
	config, err := clientcmd.Load(raw)
	if err != nil {
		w.t.Fatal(err)
	}
	w.changeKubeconfig(config)
	if raw, err = clientcmd.Write(*config); err != nil {
		w.t.Fatal(err)
	}
	if err := unstructured.SetNestedField(secret.Object, base64.StdEncoding.EncodeToString(raw), "data", join.KubeconfigKey); err != nil {
		w.t.Fatal(err)
	}
}

// apply applies objects on the member, like `kubectl apply --server-side`.
func (w *world) apply(objects []*unstructured.Unstructured) {
	w.t.Helper()
	for _, obj := range objects {
		err := w.client.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(obj), client.FieldOwner("kubectl"), client.ForceOwnership)
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// startAgent starts the member's agent; stop ends it and waits.
func (w *world) startAgent() (stop func()) {
	w.t.Helper()
	_, stop = w.runAgent(w.t.Context(), w.member.Config)
	return stop
}

// runAgent starts the member's agent with the client configuration member. ended is closed when the agent has ended;
// stop ends it and waits.
func (w *world) runAgent(ctx context.Context, member *rest.Config) (ended <-chan struct{}, stop func()) {
	w.t.Helper()
	return w.runAgentWith(ctx, agent.Options{Member: member})
}

// runAgentWith starts an agent for the world's cluster.
func (w *world) runAgentWith(ctx context.Context, options agent.Options) (ended <-chan struct{}, stop func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.logging(ctx))
	done := make(chan struct{})
	options.Namespace, options.Name, options.Heartbeat = w.cluster.Namespace, w.cluster.Name, time.Second
	go func() {
		defer close(done)
		if err := agent.Run(ctx, options); err != nil {
			w.t.Errorf("agent: %v", err)
		}
	}()
	once := sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			w.t.Error("the agent did not end")
		}
	})
	w.t.Cleanup(once)
	return done, once
}

// logging returns ctx with a log that is printed if the test fails, unless ctx has a log.
func (w *world) logging(ctx context.Context) context.Context {
	if _, err := logr.FromContext(ctx); err == nil {
		return ctx
	}
	j := &logRecorder{}
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("the agent's log:\n%s", strings.Join(j.linesWith(""), "\n"))
		}
	})
	return log.IntoContext(ctx, j.logger())
}

func (w *world) sveltosCluster() *libv1beta1.SveltosCluster {
	w.t.Helper()
	cluster := &libv1beta1.SveltosCluster{}
	if err := w.hubClient.Get(w.t.Context(), w.cluster, cluster); err != nil {
		w.t.Fatal(err)
	}
	return cluster
}

// deliver delivers b like the hub, until the agent reports state.
func (w *world) deliver(b bundle.Bundle, state bundle.State) bundle.Report {
	w.t.Helper()
	digest, err := b.Digest()
	if err != nil {
		w.t.Fatal(err)
	}
	m := fleet.FromSveltosCluster(w.sveltosCluster())
	var report bundle.Report
	w.eventually("bundle is "+string(state), func(ctx context.Context) error {
		if report, err = w.transport.Deliver(ctx, m, b); err != nil {
			return err
		}
		if report.State != state || report.Digest != digest {
			return fmt.Errorf("the report is %s: %s", report.State, report.Message)
		}
		return nil
	})
	return report
}

func (w *world) withdraw(id bundle.ID) {
	w.t.Helper()
	m := fleet.FromSveltosCluster(w.sveltosCluster())
	w.eventually("bundle is withdrawn", func(ctx context.Context) error {
		done, err := w.transport.Withdraw(ctx, m, bundle.Withdrawal{ID: id})
		if err == nil && !done {
			err = fmt.Errorf("not done")
		}
		return err
	})
}

// value returns the value of "key" in the ConfigMap on the member.
func (w *world) value(ctx context.Context, name string) (string, error) {
	obj := &corev1.ConfigMap{}
	err := w.client.Get(ctx, client.ObjectKey{Namespace: "app", Name: name}, obj)
	return obj.Data["key"], err
}

func (w *world) wantValue(name, want string) {
	w.t.Helper()
	w.eventually("ConfigMap "+name+" has "+want, func(ctx context.Context) error {
		got, err := w.value(ctx, name)
		if err == nil && got != want {
			err = fmt.Errorf("the value is %q", got)
		}
		return err
	})
}

func (w *world) wantDeleted(name string) {
	w.t.Helper()
	if got, err := w.value(w.t.Context(), name); client.IgnoreNotFound(err) != nil || err == nil {
		w.t.Errorf("ConfigMap %s: got %q and error %v, want none", name, got, err)
	}
}

// eventually fails the test unless check succeeds within a minute.
func (w *world) eventually(condition string, check func(context.Context) error) {
	w.t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		w.t.Fatalf("wait until %s: %v; last error: %v", condition, err, last)
	}
}

var id = bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "profile-sveltos-c1", Feature: "Resources"}

// bundleOf returns a bundle of one ConfigMap per name, all with value.
func bundleOf(value string, names ...string) bundle.Bundle {
	b := bundle.Bundle{
		ID: id, Owner: bundle.Owner{Kind: "ClusterProfile", Name: "profile", Tier: 100}, Options: bundle.Options{CorrectDrift: true},
	}
	item := bundle.Item{Reference: bundle.Reference{Kind: "ConfigMap", Namespace: "default", Name: "source"}}
	for _, name := range names {
		item.Objects = append(item.Objects, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": "app", "name": name}, "data": map[string]any{"key": value},
		}})
	}
	b.Items = []bundle.Item{item}
	return b
}

func configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: name}}
}
