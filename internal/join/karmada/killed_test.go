package karmada_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/localkube/faults"
)

// lifeline ends both ways of a command at once, as its death does: after the writing request at to the hub, nothing
// gets anywhere any more.
type lifeline struct {
	at   int64
	seen atomic.Int64
	dead atomic.Bool
}

func (l *lifeline) on(config *rest.Config, counts bool) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if l.dead.Load() {
				return nil, faults.ErrConnection
			}
			answer, err := next.RoundTrip(request)
			if counts && request.Method != http.MethodGet && l.seen.Add(1) == l.at {
				l.dead.Store(true)
			}
			return answer, err
		})
	})
	return config
}

// killed runs a Join that is killed after its write number at to the hub. ended is true if the Join had fewer writes.
func (w *world) killed(t *testing.T, r karmada.JoinRequest, at int64) (ended bool) {
	t.Helper()
	line := &lifeline{at: at}
	r.Hub, r.Member = line.on(w.hub.Config, true), line.on(w.member.Config, false)
	err := karmada.Join(t.Context(), r)
	if err == nil && line.dead.Load() {
		return false // it died when everything was done
	}
	return err == nil
}

func TestJoinResumesAKilledJoin(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	r := w.joinRequest("killed")
	for at := int64(1); ; at++ {
		ended := w.killed(t, r, at)
		err := karmada.Join(t.Context(), r)
		done := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "killed"}}
		switch {
		case errors.Is(err, karmada.ErrAlreadyRegistered) && at > 4:
			// The first one was through.
		case err != nil || ended:
			t.Fatalf("after a join that was killed at request %d (ended %t): %v", at, ended, err)
		}
		wantJoined(t, w, r)
		if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(done), done); err != nil || done.Annotations["towline.dev/registration-unfinished"] != "" {
			t.Errorf("after request %d: error %v, annotations %v", at, err, done.Annotations)
		}
		if err := karmada.Unjoin(t.Context(), w.unjoinRequest("killed")); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			break
		}
	}
	wantSame(t, "the member", w.memberClient, before)
}

// unfinished leaves a Cluster behind whose join was killed.
func (w *world) unfinished(t *testing.T, r karmada.JoinRequest) {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: r.Name}}
	for at := int64(1); w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(c), c) != nil; at++ {
		w.killed(t, r, at)
	}
}

func TestConcurrentJoinsOfOneCluster(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	r := w.joinRequest("resumed")
	w.unfinished(t, r)
	if err := karmada.Join(t.Context(), w.joinRequest("resumed-not")); !errors.Is(err, karmada.ErrAlreadyRegistered) {
		t.Errorf("another name: got %v, want ErrAlreadyRegistered", err)
	}
	var racing sync.WaitGroup
	errs := make([]error, 5)
	for i := range errs {
		racing.Go(func() { errs[i] = karmada.Join(t.Context(), r) })
	}
	racing.Wait()
	for _, err := range errs {
		// A run that begins after another one has finished fails.
		if err != nil && !errors.Is(err, karmada.ErrAlreadyRegistered) {
			t.Errorf("got %v, want success or ErrAlreadyRegistered", err)
		}
	}
	if !slices.Contains(errs, nil) {
		t.Error("no run joined the cluster")
	}
	wantJoined(t, w, r)
	if err := karmada.Unjoin(t.Context(), w.unjoinRequest(r.Name)); err != nil {
		t.Fatal(err)
	}
	wantSame(t, "the member", w.memberClient, before)
}

func TestFailedResumeCanBeRepeated(t *testing.T) {
	w := alone(t)
	before, hubBefore := everything(t, w.memberClient), ownOn(t, w.hubClient, "twice")
	for kind, effect := range requestFaults {
		for at := int64(1); at < 4; at++ {
			r := w.joinRequest("twice")
			w.unfinished(t, r)
			ctx, cancel := context.WithCancel(t.Context())
			r.Hub = (&faults.Fault{At: at, Effect: effect(cancel)}).On(w.hub.Config)
			err := karmada.Join(ctx, r)
			cancel()
			if err == nil {
				t.Fatalf("%s at %d: joined", kind, at)
			}
			if err := karmada.Join(t.Context(), w.joinRequest("twice")); err != nil {
				t.Fatalf("%s at %d: after a resume that failed: %v", kind, at, err)
			}
			wantJoined(t, w, w.joinRequest("twice"))
			if err := karmada.Unjoin(t.Context(), w.unjoinRequest("twice")); err != nil {
				t.Fatal(err)
			}
			wantSame(t, kind+" on the member: "+err.Error(), w.memberClient, before)
			wantOwn(t, w.hubClient, "twice", hubBefore)
		}
	}
}
