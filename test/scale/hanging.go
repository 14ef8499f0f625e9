package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// unresponsiveServer accepts connections and never answers: the TLS handshake of a client does not end.
type unresponsiveServer struct {
	listener  net.Listener
	accepting sync.WaitGroup
	// accepted is the number of connections.
	accepted atomic.Int64
}

// startUnresponsiveServer starts a server at a free port. The caller calls stop.
func startUnresponsiveServer(ctx context.Context) (*unresponsiveServer, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &unresponsiveServer{listener: listener}
	s.accepting.Go(s.acceptConnections)
	return s, nil
}

// acceptConnections counts the connections, and keeps them open until the listener is closed.
func (s *unresponsiveServer) acceptConnections() {
	var open []net.Conn
	for {
		connection, err := s.listener.Accept()
		if err != nil {
			break
		}
		s.accepted.Add(1)
		open = append(open, connection)
	}
	for _, connection := range open {
		_ = connection.Close() // nothing was written to it
	}
}

func (s *unresponsiveServer) stop() {
	_ = s.listener.Close() // an error means that it is closed
	s.accepting.Wait()
}

// hanging registers push clusters whose API server accepts connections and never answers, and changes the content. It
// fails if the hub opens no connection to them: then the change was measured without clusters that hang.
func hanging(ctx context.Context, r *run, result *result) error {
	server, err := startUnresponsiveServer(ctx)
	if err != nil {
		return err
	}
	defer server.stop()
	kubeconfig := fmt.Sprintf(`
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "https://%s"}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
users: [{name: a, user: {token: t}}]
`, server.listener.Addr())
	n := max(r.clusters/20, 1)
	if err := inParallel(n, func(i int) error { return r.createPushCluster(ctx, fmt.Sprintf("hanging%05d", i), kubeconfig) }); err != nil {
		return err
	}
	sleep(ctx, 5*time.Second)
	if err := r.changeContents(ctx, result, r.sharedNames()[:1], r.clusters); err != nil {
		return err
	}
	accepted := server.accepted.Load()
	if accepted == 0 {
		return fmt.Errorf("the hub opened no connection to the %d push clusters that never answer", n)
	}
	result.add("connections to clusters that never answer", float64(accepted), "")
	return nil
}

// createPushCluster registers a push cluster that the shared profiles select. Its status claims an earlier answer, so
// that the hub reconciles the summaries.
func (r *run) createPushCluster(ctx context.Context, name, kubeconfig string) error {
	if err := r.hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: name + "-sveltos-kubeconfig"}, StringData: map[string]string{"kubeconfig": kubeconfig}}
	if err := r.hub.client.Create(ctx, secret); err != nil {
		return err
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: name, Labels: map[string]string{allLabel: "true"}}}
	if err := r.hub.client.Create(ctx, cluster); err != nil {
		return err
	}
	before := cluster.DeepCopy()
	cluster.Status.Ready, cluster.Status.Version = true, memberVersion
	return r.hub.client.Status().Patch(ctx, cluster, client.MergeFrom(before))
}
