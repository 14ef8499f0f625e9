package karmada

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/kube"
)

const (
	// writeTries bounds how often an object is written again that others change at the same time.
	writeTries = 20
	// writePause is the time between two tries.
	writePause = 20 * time.Millisecond
)

// insist repeats do while others change the same object at the same time, who may be as many as there are clusters that join.
func insist(ctx context.Context, do func() error) error {
	return kube.InsistAt(ctx, wait.Backoff{Steps: writeTries, Duration: writePause}, kube.ChangedMeanwhile, do)
}
