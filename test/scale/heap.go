package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// freeAddress returns an address of this machine that no process listens on.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// writeHeapProfile writes a heap profile of the hub, after a garbage collection, to a file.
func (h *testHub) writeHeapProfile(ctx context.Context, file string) error {
	token, err := h.createProfileReader(ctx)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+h.diagnosticsAddress+"/debug/pprof/heap?gc=1", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // the certificate is self-signed
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // the error of reading counts
	profile, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the hub answers %s: %.200s", response.Status, profile)
	}
	return os.WriteFile(file, profile, 0o600)
}

// createProfileReader returns a token of a new ServiceAccount that may get profiles.
func (h *testHub) createProfileReader(ctx context.Context) (string, error) {
	meta := metav1.ObjectMeta{Name: "profile-reader", Namespace: metav1.NamespaceDefault}
	account := &corev1.ServiceAccount{ObjectMeta: meta}
	for _, obj := range []client.Object{
		account,
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: meta.Name},
			Rules:      []rbacv1.PolicyRule{{NonResourceURLs: []string{"/debug/pprof/*"}, Verbs: []string{"get"}}},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: meta.Name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: meta.Namespace, Name: meta.Name}},
		},
	} {
		if err := h.client.Create(ctx, obj); err != nil {
			return "", err
		}
	}
	token := &authenticationv1.TokenRequest{}
	if err := h.client.SubResource("token").Create(ctx, account, token); err != nil {
		return "", err
	}
	return token.Status.Token, nil
}
