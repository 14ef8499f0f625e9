package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc/grpclog"
	"k8s.io/klog/v2"
)

// libraryLog is the file in the data directory for the errors that the Kubernetes libraries log. Most say that something will be tried
// again, above all while the parts of a control plane start and stop; what matters is returned as an error and printed.
const libraryLog = "kubernetes.log"

// redirectLogs sends the errors of the Kubernetes libraries to file and drops the rest of what they log.
func redirectLogs(file *os.File) {
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	flags := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(flags)
	for _, arg := range []string{"logtostderr=false", "alsologtostderr=false", "stderrthreshold=FATAL"} {
		if err := flags.Parse([]string{"-" + arg}); err != nil {
			panic(fmt.Sprintf("set klog flag %s: %v", arg, err))
		}
	}
	klog.SetOutput(io.Discard)
	klog.SetOutputBySeverity("ERROR", file)
}
