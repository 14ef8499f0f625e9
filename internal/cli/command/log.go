package command

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

// LogFlags are the flags of the log of a hub or an agent.
type LogFlags struct {
	verbosity int
	// Format is LogText or OutputJSON.
	Format string
}

// Add adds the flags to flags.
func (l *LogFlags) Add(flags *pflag.FlagSet) {
	flags.IntVarP(&l.verbosity, "v", "v", 0, "verbosity `level` of the log; levels above 5 are for debugging")
	flags.StringVar(&l.Format, "log-format", LogText, "`format` of the log, text or json")
}

// LogText is the value of --log-format for logs in text.
const LogText = "text"

// infoVerbosity is the highest value of -v without debug logs. The manifest of an agent has --v=5, as in Sveltos, and
// its users expect a short log.
const infoVerbosity = 5

// WithLogger returns a context with a logger that writes to out. It is the logger of the libraries in this process,
// too.
func (l *LogFlags) WithLogger(ctx context.Context, out io.Writer) (context.Context, error) {
	// logr's V(n) is slog's level -n.
	options := &slog.HandlerOptions{Level: slog.Level(-max(l.verbosity-infoVerbosity, 0))}
	var handler slog.Handler
	switch l.Format {
	case LogText:
		handler = slog.NewTextHandler(out, options)
	case OutputJSON:
		handler = slog.NewJSONHandler(out, options)
	default:
		return nil, fmt.Errorf("--log-format: %q is not supported, must be text or json", l.Format)
	}
	logger := logr.FromSlogHandler(handler)
	log.SetLogger(logger)
	klog.SetLogger(logger)
	return log.IntoContext(ctx, logger), nil
}
