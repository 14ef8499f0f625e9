package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// ServiceAccountDirVariable is the environment variable that names the directory with a process's token, ca.crt and namespace.
// In a container these are found at serviceAccountPath; processes share one file system and cannot have a place of their own there.
const ServiceAccountDirVariable = "TOWLINE_SERVICEACCOUNT_DIR"

const serviceAccountPath = "/var/run/secrets/kubernetes.io/serviceaccount"

const (
	// tokenLife is how long a token is asked to be valid, in seconds; a kubelet asks for the same.
	tokenLife = 3607
	// tokenRetry is how long to wait after a token could not be renewed.
	tokenRetry = 10 * time.Second
)

// mountsCredentials says whether the container may have the token of its ServiceAccount: the API server then has added a mount for it.
func (c *container) mountsCredentials() bool {
	for _, mount := range c.spec.VolumeMounts {
		if mount.MountPath == serviceAccountPath {
			return true
		}
	}
	return false
}

// serviceAccountDir returns the directory of the pod's credentials, written now if they are not there, and kept fresh as long as the pod lives.
func (p *pod) serviceAccountDir() (string, error) {
	p.credentials.Lock()
	defer p.credentials.Unlock()
	dir := filepath.Join(p.dir, "serviceaccount")
	if p.hasToken {
		return dir, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make directory for credentials: %w", err)
	}
	if err := write(dir, "ca.crt", p.node.CA); err != nil {
		return "", err
	}
	if err := write(dir, "namespace", []byte(p.object.Namespace)); err != nil {
		return "", err
	}
	renewal, err := p.writeToken(p.ctx, dir)
	if err != nil {
		return "", err
	}
	p.hasToken = true
	go p.renewToken(dir, renewal)
	return dir, nil
}

// renewToken writes a new token at renewal, and again in time before each one expires.
func (p *pod) renewToken(dir string, renewal time.Time) {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-time.After(time.Until(renewal)):
		}
		next, err := p.writeToken(p.ctx, dir)
		if err != nil {
			klog.ErrorS(err, "renew token", "pod", klog.KObj(p.object))
			next = time.Now().Add(tokenRetry)
		}
		renewal = next
	}
}

// writeToken gets a token that is void when the pod is gone, and returns when to get the next: at 80 % of its life.
func (p *pod) writeToken(ctx context.Context, dir string) (time.Time, error) {
	now := time.Now()
	accounts := p.node.Client.CoreV1().ServiceAccounts(p.object.Namespace)
	token, err := accounts.CreateToken(ctx, p.object.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: ptr.To(int64(tokenLife)),
			BoundObjectRef: &authenticationv1.BoundObjectReference{
				Kind: "Pod", APIVersion: "v1", Name: p.object.Name, UID: p.object.UID,
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return now, fmt.Errorf("request token of ServiceAccount %s: %w", p.object.Spec.ServiceAccountName, err)
	}
	return now.Add(tokenLife * time.Second * 8 / 10), write(dir, "token", []byte(token.Status.Token))
}

// write puts a file in place in one step, so that a reader never sees half of it.
func write(dir, name string, content []byte) error {
	half := filepath.Join(dir, "."+name)
	if err := os.WriteFile(half, content, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.Rename(half, filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
