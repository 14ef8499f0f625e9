package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/kube"
)

// ApplyRequest asks to register a cluster in pull mode and to start its agent there, in one go.
type ApplyRequest struct {
	PullRequest
	// Member is the way to the cluster from here. Only this call uses it: neither the hub nor the agent gets to see it.
	Member *rest.Config
	// Wait is how long the agent may take until the hub says that the cluster is ready. 0: nobody waits.
	Wait time.Duration
	// Progress is told, in one line, what is being waited for whenever that changes.
	Progress func(string)
}

// ErrNotReady says that a cluster is registered and its agent applied, but that it was not ready in time. Nothing is
// taken back.
var ErrNotReady = errors.New("the cluster is registered and its agent is applied, but it is not ready")

// RegisterAndApply registers a cluster in pull mode, applies the manifest to the member, writes to out what `kubectl
// apply` would, and waits until the cluster is ready; it returns the member's Kubernetes version then. If registering
// or applying fails, or ctx ends meanwhile, both sides are what they were before. If waiting fails, everything stays
// made and the error is ErrNotReady.
func RegisterAndApply(ctx context.Context, hub *rest.Config, r ApplyRequest, out io.Writer) (version string, err error) {
	// Asked first, since a registration may revoke tokens, which nothing brings back.
	if err := checkReach(ctx, r.Member); err != nil {
		return "", fmt.Errorf("ask the cluster: %w", err)
	}
	a, err := newApplication(r.Member, r.Request)
	if err != nil {
		return "", err
	}
	w, err := newWatcher(hub, a.member, r)
	if err != nil {
		return "", err
	}
	if err := a.checkName(ctx, w.hub); err != nil {
		return "", err
	}
	if err := w.awaitLeaving(ctx, a); err != nil {
		return "", err
	}
	if err := a.checkOwner(ctx, hub, w.hub); err != nil {
		return "", err
	}
	start := writerFunc(func(manifest []byte) error {
		// An agent that is there already has no token to beat with, or beats on; only a beat after this one counts.
		if err := w.remember(ctx); err != nil {
			return err
		}
		return a.start(ctx, manifest, out)
	})
	if err := RegisterPull(ctx, hub, r.PullRequest, start); err != nil {
		return "", alsoUndone(err, a.takeBack(ctx))
	}
	if r.Wait <= 0 {
		return "", nil
	}
	return w.await(ctx)
}

// start applies the manifest and says so, in the words of kubectl.
func (a *application) start(ctx context.Context, manifest []byte, out io.Writer) error {
	objects, err := kube.DecodeManifest(manifest)
	if err != nil {
		return fmt.Errorf("read the agent's manifest: %w", err)
	}
	var lines bytes.Buffer
	for _, obj := range objects {
		did, err := a.apply(ctx, obj)
		if err != nil {
			return err
		}
		fmt.Fprintf(&lines, "%s %s\n", kubectlName(obj), did)
	}
	did, err := a.dropFormer(ctx)
	if err != nil {
		return err
	}
	lines.WriteString(did)
	if _, err := out.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("print what was applied: %w", err)
	}
	return nil
}

// writerFunc is a function that takes a whole manifest in one call.
type writerFunc func([]byte) error

// Write hands the manifest on.
func (f writerFunc) Write(p []byte) (int, error) {
	if err := f(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
