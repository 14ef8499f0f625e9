package registration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/hub/registration"
)

// A cluster whose registration hangs delays no other cluster, and its own requests only until they end.
func TestClusterLocks(t *testing.T) {
	t.Parallel()
	var locks registration.ClusterLocks
	hanging := types.NamespacedName{Namespace: "fleet", Name: "hanging"}
	unlock, err := locks.Lock(t.Context(), hanging)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		unlockOther, err := locks.Lock(t.Context(), types.NamespacedName{Namespace: "fleet", Name: fmt.Sprint("other-", i)})
		if err != nil {
			t.Fatal(err)
		}
		unlockOther()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := locks.Lock(ended, hanging); !errors.Is(err, context.Canceled) {
		t.Fatalf("a second lock: %v", err)
	}
	waiting := make(chan error)
	go func() {
		unlockAgain, err := locks.Lock(t.Context(), hanging)
		if err == nil {
			unlockAgain()
		}
		waiting <- err
	}()
	unlock()
	if err := <-waiting; err != nil {
		t.Errorf("after the unlock: %v", err)
	}
}
