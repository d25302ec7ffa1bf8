# Print the words that can stand at the end of a command line, each with a tab and its help.
# Arguments: the words after gpt-lightning; the last one is being typed, and may be empty.
# Input: the table, whose columns are command, word, values of the word, help.
# A line "@file" in the output means that paths can stand there as well.
# This text is between single quotes in three shells: it has no such quote and no backslash.
BEGIN {
    FS = "	"
    for (n = 0; n < ARGC - 1; n++) typed[n + 1] = ARGV[n + 1]
    ARGC = 1 # the words are not files
}
{ command[NR] = $1; word[NR] = $2; values[NR] = $3; about[NR] = $4; known[$1] = 1 }
function offer(list,    count, part, i, row) {
    count = split(list, part, " ")
    for (i = 1; i <= count; i++) {
        if (part[i] != "@config") print part[i]
        else for (row = 1; row <= NR; row++) if (command[row] == "@config") print word[row]
    }
}
# True if a row belongs to the command, or to the options of fit that the command passes on.
function mine(row) {
    return command[row] == name || (passes && command[row] == "fit" && word[row] ~ /^--.*[.]/)
}
END {
    current = typed[n]
    name = n > 1 ? typed[1] : ""
    if (n > 2 && ((name " " typed[2]) in known)) name = name " " typed[2]
    for (row = 1; row <= NR; row++) if (command[row] == name && word[row] == "@fit") passes = 1
    if (current ~ /^--.*=/) option = substr(current, 1, index(current, "=") - 1)
    else if (n > 1 && typed[n - 1] ~ /^-/ && typed[n - 1] !~ /=/) option = typed[n - 1]
    for (row = 1; option != "" && row <= NR; row++) {
        if (mine(row) && word[row] == option && values[row] != "-") { offer(values[row]); exit }
    }
    paths = n > 1 # a word that the table does not have is a path
    for (row = 1; row <= NR; row++) {
        if (!mine(row) || word[row] ~ /^@/ || (word[row] ~ /^-/) != (current ~ /^-/)) continue
        if (word[row] == "") offer(values[row])
        else print word[row] "	" about[row]
        paths = 0
    }
    if (paths) print "@file"
}
