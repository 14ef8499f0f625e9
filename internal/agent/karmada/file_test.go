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

// An agent can run anywhere: then its way to the hub is a file, which it keeps fresh, and it takes nothing with it but what it made.
func TestAgentElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "elsewhere", 10*time.Minute)
	t.Cleanup(w.approve())
	w.hold()
	path := filepath.Join(t.TempDir(), "hub.config")
	first := w.secret().Data[register.KubeconfigKey]
	if err := os.WriteFile(path, first, 0o600); err != nil {
		t.Fatal(err)
	}
	ended, _, _ := w.start(func(o *Options) {
		o.HubSecret, o.HubKubeconfig, o.RotationThreshold, o.LeaderElect = "", path, 0.66, true
	})
	w.ready()
	w.work("one", "first")
	w.wantValue("one", "first")
	memo := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.place, Name: electionName(w.name)}}
	w.eventually("the certificate in the file is renewed", func(ctx context.Context) error {
		now, err := os.ReadFile(path)
		if err == nil && bytes.Equal(now, first) {
			err = errors.New("it is not")
		}
		return errors.Join(err, w.memberClient.Get(ctx, client.ObjectKeyFromObject(memo), memo))
	})
	if memo.Annotations[kube.AnnotationScope] != string(w.cluster().UID) || memo.Annotations[kube.AnnotationHub] != w.hubID {
		t.Errorf("what it remembers: %v", memo.Annotations)
	}
	w.order()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(40 * time.Second):
		t.Fatal("the agent did not end")
	}
	w.answered()
	w.gone(w.memberClient, memo)
	// The Secret is somebody else's, and so is the namespace with it.
	if w.secret().UID == "" {
		t.Error("the Secret is gone")
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}
