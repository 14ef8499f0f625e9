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

// logFlags are the flags of the commands that run on and log.
type logFlags struct {
	verbosity int
	format    string
}

func (l *logFlags) add(flags *pflag.FlagSet) {
	flags.IntVarP(&l.verbosity, "v", "v", 0, "`level` of the log: the higher, the more is said; above 5 is for debugging")
	flags.StringVar(&l.format, "log-format", logText, "`text` or json")
}

// logText is the value of --log-format for logs that people read.
const logText = "text"

// quietVerbosity: the manifest of a registration says --v=5, which people expect to be quiet enough to read.
const quietVerbosity = 5

// start makes a logger that writes to out the one of this process, its libraries included, and puts it into the context.
func (l *logFlags) start(ctx context.Context, out io.Writer) (context.Context, error) {
	// logr's V(n) is slog's level -n.
	options := &slog.HandlerOptions{Level: slog.Level(-max(l.verbosity-quietVerbosity, 0))}
	var handler slog.Handler
	switch l.format {
	case logText:
		handler = slog.NewTextHandler(out, options)
	case outputJSON:
		handler = slog.NewJSONHandler(out, options)
	default:
		return nil, fmt.Errorf("--log-format: %q is not supported, only text and json are", l.format)
	}
	logger := logr.FromSlogHandler(handler)
	log.SetLogger(logger)
	klog.SetLogger(logger)
	return log.IntoContext(ctx, logger), nil
}
