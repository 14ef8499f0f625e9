package karmada

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

// An agent outside the member keeps the kubeconfig in a file, renews it, and uninstalls only its own objects.
func TestAgentOutsideItsMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "elsewhere", 10*time.Minute)
	t.Cleanup(w.approveRequests())
	w.addFinalizer()
	path := filepath.Join(t.TempDir(), "hub.config")
	first := w.secret().Data[register.KubeconfigKey]
	if err := os.WriteFile(path, first, 0o600); err != nil {
		t.Fatal(err)
	}
	ended, _, _ := w.startAgent(func(o *Options) {
		o.HubSecret, o.HubKubeconfig, o.RotationThreshold, o.LeaderElect = "", path, 0.66, true
	})
	w.wantReady()
	w.createWork("one", "first")
	w.wantValue("one", "first")
	memo := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: electionName(w.name)}}
	w.eventually("the certificate in the file is renewed", func(ctx context.Context) error {
		now, err := os.ReadFile(path)
		if err == nil && bytes.Equal(now, first) {
			err = errors.New("it is the first one")
		}
		return errors.Join(err, w.memberClient.Get(ctx, client.ObjectKeyFromObject(memo), memo))
	})
	if memo.Annotations[kube.AnnotationScope] != string(w.cluster().UID) || memo.Annotations[kube.AnnotationHub] != w.hubID {
		t.Errorf("state: %v", memo.Annotations)
	}
	w.requestRemoval()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(40 * time.Second):
		t.Fatal("the agent did not end")
	}
	w.wantAnswer()
	w.wantDeleted(w.memberClient, memo)
	// The Secret is foreign, and its namespace stays with it.
	if w.secret().UID == "" {
		t.Error("the Secret was deleted")
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}
