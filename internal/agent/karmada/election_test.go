package karmada

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func TestOneOfSeveralAgentsWorks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "elect", time.Hour)
	elect := func(identity string) func(*Options) {
		return func(o *Options) { o.LeaderElect, o.Identity = true, identity }
	}
	holder := func(want string) {
		t.Helper()
		w.eventually(want+" works", func(ctx context.Context) error {
			lease := &coordinationv1.Lease{}
			err := w.memberClient.Get(ctx, client.ObjectKey{Namespace: w.place, Name: electionName(w.name)}, lease)
			if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != want) {
				err = errors.New("it does not")
			}
			return err
		})
		w.eventually("the hub hears "+want, func(ctx context.Context) error {
			lease, err := w.lease(ctx)
			if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != want) {
				err = fmt.Errorf("it hears %v", lease.Spec.HolderIdentity)
			}
			return err
		})
	}
	_, stop, _ := w.start(elect("first"))
	holder("first")
	_, _, _ = w.start(elect("second"))
	w.work("one", "first")
	w.wantValue("one", "first")
	w.settle(3 * time.Second)
	holder("first")
	stop()
	// It gave the election back: nobody waits for it.
	began := time.Now()
	holder("second")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("taking over took %s", took)
	}
	w.work("two", "second")
	w.wantValue("two", "second")
}
