package controlplane

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// etcdSocket is the client socket of etcd. It is relative to the working directory, because the path of a unix socket
// is limited to 107 bytes and the data directory may well be deeper than that.
const etcdSocket = "etcd.sock"

const (
	// tick is the interval of the clock of etcd, in milliseconds.
	tick = 50
	// requestTimeout is added to the 5 s after which a request to etcd fails.
	requestTimeout = 50 * time.Second
)

// startEtcd runs a single-member etcd whose data live in Dir/etcd, and returns once it serves.
// The working directory must be Dir. Nothing is flushed to disk: the data survive the process, not the machine.
func startEtcd(ctx context.Context, opts Options) (*embed.Etcd, error) {
	if err := os.RemoveAll(etcdSocket); err != nil {
		return nil, fmt.Errorf("remove stale etcd socket: %w", err)
	}
	// Two of these files are reserved at the start, of 64 MB each by default.
	wal.SegmentSizeBytes = 16 << 20
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(opts.Dir, "etcd")
	cfg.ListenPeerUrls = nil
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Host: etcdSocket}}
	cfg.EnableGRPCGateway = false
	cfg.UnsafeNoFsync = true
	// The only member elects itself after 1 to 6 ticks of the smallest number per election, which is 5. It ticks for as long as
	// it lives: 100 times a second, as it was, takes a third of the processor time of an idle control plane.
	cfg.TickMs = tick
	cfg.ElectionMs = 250
	// The write-ahead log has what the backend does not have yet when the process ends.
	cfg.BackendBatchInterval = 500 * time.Millisecond // upstream: 100 ms
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(errorLogger(opts.Log))
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	select {
	case <-server.Server.ReadyNotify():
		// A request fails after 5 s and two elections. On a busy machine a request waits longer. The API server limits
		// requests to 60 s.
		server.Server.Cfg.ElectionTicks = int(requestTimeout / 2 / (tick * time.Millisecond))
		return server, nil
	case err := <-server.Err():
		return nil, fmt.Errorf("run etcd: %w", err)
	case <-ctx.Done():
		server.Close()
		return nil, fmt.Errorf("wait for etcd: %w", context.Cause(ctx))
	}
}

func errorLogger(w io.Writer) *zap.Logger {
	encoder := zapcore.NewConsoleEncoder(zap.NewProductionEncoderConfig())
	return zap.New(zapcore.NewCore(encoder, zapcore.AddSync(w), zapcore.ErrorLevel))
}
