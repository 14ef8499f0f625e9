package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// logFlags are the flags of the log of a hub or an agent.
type logFlags struct {
	verbosity int
	format    string
}

func (l *logFlags) add(flags *pflag.FlagSet) {
	flags.IntVarP(&l.verbosity, "v", "v", 0, "verbosity `level` of the log; levels above 5 are for debugging")
	flags.StringVar(&l.format, "log-format", logText, "`format` of the log, text or json")
}

// logText is the value of --log-format for logs in text.
const logText = "text"

// infoVerbosity is the highest value of -v without debug logs. The manifest of an agent has --v=5, as in Sveltos, and
// its users expect a short log.
const infoVerbosity = 5

// withLogger returns a context with a logger that writes to out. It is the logger of the libraries in this process,
// too.
func (l *logFlags) withLogger(ctx context.Context, out io.Writer) (context.Context, error) {
	// logr's V(n) is slog's level -n.
	options := &slog.HandlerOptions{Level: slog.Level(-max(l.verbosity-infoVerbosity, 0))}
	var handler slog.Handler
	switch l.format {
	case logText:
		handler = slog.NewTextHandler(out, options)
	case outputJSON:
		handler = slog.NewJSONHandler(out, options)
	default:
		return nil, fmt.Errorf("--log-format: %q is not supported, must be text or json", l.format)
	}
	logger := logr.FromSlogHandler(handler)
	log.SetLogger(logger)
	klog.SetLogger(logger)
	return log.IntoContext(ctx, logger), nil
}
