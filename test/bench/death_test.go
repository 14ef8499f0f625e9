package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// killInterval is the time between the kills of two members. Four of them are the interval of heartbeats, so that each
// member is killed at another time after its last heartbeat.
const killInterval = 5 * time.Second

// BenchmarkMemberKilled measures the time from the end of a member, with its agent, by kill -9 until the hub marks the
// cluster as Down.
func BenchmarkMemberKilled(b *testing.B) {
	bd := newTestBench(b)
	names := []string{"killed0", "killed1", "killed2", "killed3"}
	kill := map[string]func() error{}
	for _, name := range names {
		kill[name] = bd.startPullMember(name, "env=killed").Kill
	}
	<-time.After(pauseTime)
	killed := map[string]time.Time{}
	for _, name := range names {
		if err := kill[name](); err != nil {
			b.Fatal(err)
		}
		killed[name] = time.Now()
		<-time.After(killInterval)
	}
	var times []time.Duration
	bd.eventually("all are Down", func(ctx context.Context) error {
		var alive error
		for name, at := range killed {
			if err := bd.wantDown(ctx, name); err != nil {
				alive = err
				continue
			}
			times = append(times, time.Since(at))
			delete(killed, name)
		}
		return alive
	})
	b.ReportMetric(0, "ns/op")
	bd.reportQuantiles(times)
}

// wantDown returns an error unless the cluster with this name and namespace is Down.
func (b *testBench) wantDown(ctx context.Context, name string) error {
	var cluster libv1beta1.SveltosCluster
	if err := b.hub.Get(ctx, client.ObjectKey{Namespace: name, Name: name}, &cluster); err != nil {
		return err
	}
	if cluster.Status.ConnectionStatus != libv1beta1.ConnectionDown {
		return fmt.Errorf("the connection of %s is %s", name, cluster.Status.ConnectionStatus)
	}
	return nil
}
